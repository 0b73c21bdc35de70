"""Published training runs, each as a decided setup on its hardware."""

import csv
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from msgspec import Struct

from orchestrator.contract.mesh import Mesh
from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.inventory.software import BUNDLED, for_software
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.setup import Setup

FOLDER = Path(__file__).parent
DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class Source(Struct, frozen=True, kw_only=True):
    """See `sources.toml`."""

    name: str
    title: str
    address: str
    date: str
    table: str
    use: Literal["calibration", "checked", "held out"]
    reads: str
    software: str = BUNDLED
    method: Literal["sliced gather", "whole norms"] | None = None
    """What it does in each step beside a plan; see `methods.py`."""
    network: Literal["infiniband", "ethernet"] = "infiniband"
    """Kind of the links between hosts. RoCE is `ethernet`."""
    superseded_by: str | None = None
    """The source that has runs of a later version of the same software by the same authors."""


class Run(NamedTuple):
    source: Source
    model: str
    profile: str
    setup: Setup
    fabric: Fabric
    tokens_per_second_per_device: float
    memory_bytes: int | None
    """Largest memory that torch's allocator had given out; None: not published."""
    other_method: bool
    """The run shares work between ranks by a method that no setup of ndctl describes; `reads` says
    which. Such runs are reported apart."""


class Hardware(NamedTuple):
    profile: str
    hosts: int
    devices_per_host: int
    attention: str
    """Kernel."""
    inter_host_bytes_per_s: str
    """Empty: as in the profile."""
    intra_host_bytes_per_s: str
    """The same."""
    hosts_per_nvlink_block: int
    """0: NVLink ends with the host."""
    software: str
    network: str


@cache
def sources() -> Mapping[str, Source]:
    known = tomllib.loads((FOLDER / "sources.toml").read_text())
    return {name: Source(name=name, **table) for name, table in known.items()}


@cache
def runs() -> tuple[Run, ...]:
    """Published runs, in the order of `sources.toml` and of the rows, without superseded software:
    its speed says nothing about software of today. And without adapters: all of these runs are of
    one model."""
    return tuple(
        run for run in all_runs() if run.source.superseded_by is None and run.setup.lora is None
    )


@cache
def runs_with_adapters() -> tuple[Run, ...]:
    """Compared, but in no range."""
    return tuple(run for run in all_runs() if run.setup.lora is not None)


@cache
def all_runs() -> tuple[Run, ...]:
    return tuple(run for source in sources().values() for run in _runs_of(source))


def _runs_of(source: Source) -> Iterator[Run]:
    path = FOLDER / "runs" / f"{source.name}.csv"
    if not path.exists():  # a source of kernel speeds
        return
    with path.open() as file:
        for row in csv.DictReader(file):
            yield Run(
                source=source,
                model=row["model"],
                profile=row["profile"],
                setup=_setup(row),
                fabric=_fabric(_hardware(source, row)),
                tokens_per_second_per_device=float(row["tokens_per_second_per_device"]),
                memory_bytes=int(row["memory_bytes"]) if row["memory_bytes"] else None,
                other_method=row.get("other_method") == "true",
            )


def _hardware(source: Source, row: Mapping[str, str]) -> Hardware:
    return Hardware(
        profile=row["profile"],
        hosts=int(row["hosts"]),
        devices_per_host=int(row["devices_per_host"]),
        attention=row["attention"],
        inter_host_bytes_per_s=row["inter_host_bytes_per_s"],
        intra_host_bytes_per_s=row.get("intra_host_bytes_per_s", ""),
        hosts_per_nvlink_block=int(row.get("hosts_per_nvlink_block") or 0),
        software=source.software,
        network=source.network,
    )


def _setup(row: Mapping[str, str]) -> Setup:
    stages = int(row["stages_per_rank"])
    return Setup(
        shape=shape_of(_config(row["model"], int(row["tokens"]))),
        tokens=int(row["tokens"]),
        mesh=Mesh(**{axis: int(row[axis]) for axis in DEGREES}),
        micro_batch_size=int(row["micro_batch_size"]),
        micro_batches=int(row["micro_batches"]),
        checkpointing=cast(Any, row["checkpointing"]),
        checkpoint_every=int(row.get("checkpoint_every") or 0) or None,
        data=cast(Any, row["data"]),
        reshard=row["reshard"] == "true",
        reduce=cast(Any, row["reduce"]),
        reduce_dtype=cast(Any, row["reduce_dtype"]),
        context=cast(Any, row["context"]),
        pipeline=PipelineSpec(
            schedule="1f1b" if stages == 1 else "interleaved_1f1b", stages_per_rank=stages
        ),
        compile=row["compile"] == "true",
        compiles_recomputation=True,
        even_stages=row.get("even_stages") == "true",
        float8=row["float8"] == "true",
        cpu_offload=row.get("cpu_offload") == "true",
        lora=LoraSpec(rank=int(row["lora_rank"])) if row.get("lora_rank") else None,
    )


def _config(model: str, tokens: int) -> Mapping[str, Any]:
    config = _models()[model]
    positions = tokens if config.get("n_positions") == "tokens" else config.get("n_positions")
    return config if positions is None else {**config, "n_positions": positions}


@cache
def _models() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads((FOLDER / "models.toml").read_text())


@cache
def _fabric(given: Hardware) -> Fabric:
    overrides: dict[str, Any] = {
        "calibration": {"attention": given.attention},
        "inter_host": {"kind": given.network},
        "intra_host": {},
    }
    if given.inter_host_bytes_per_s:
        overrides["inter_host"]["bytes_per_s"] = float(given.inter_host_bytes_per_s)
    if given.intra_host_bytes_per_s:
        overrides["intra_host"]["bytes_per_s"] = float(given.intra_host_bytes_per_s)
    hosts, block = given.hosts, given.hosts_per_nvlink_block
    blocks = [block] * (hosts // block) + [hosts % block] if block else []
    profile = load_profile(given.profile, overrides, "the published run")
    return Fabric(
        profile=for_software(profile, given.software),
        hosts=hosts,
        devices_per_host=given.devices_per_host,
        blocks=tuple(size for size in blocks if size),
    )
