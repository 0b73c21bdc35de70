"""`ndctl calibrate`: run the measurements on the hosts at hand, and write their profile."""

import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec import Struct

from orchestrator.agent.rank_socket import free_port
from orchestrator.calibrate.fit import fit, nominal, notes_of
from orchestrator.calibrate.show import profile_text
from orchestrator.contract.devices import CPU
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.messages.measurements import Measurements
from orchestrator.errors import BackendError, SpecError
from orchestrator.inventory.local import MODELS, visible_gpus
from orchestrator.inventory.profile import Profile
from orchestrator.inventory.profiles import load_profile
from orchestrator.inventory.slurm.hostlist import expand
from orchestrator.run_module import command
from orchestrator.seams import Clock, Shell

START_S = 240.0
"""Limit beyond the budget: to import torch, to find all hosts, and for slow repetitions."""
FIRST_PORT, PORTS = 20_000, 20_000
LIKE = "h100-sxm-80gb"
"""Profile of GPUs that no profile describes. All its rates are replaced."""


class Hosts(Struct, frozen=True, kw_only=True):
    """The hosts at hand: this one, or those of the job step that runs `ndctl calibrate`."""

    names: tuple[str, ...]
    rank: int
    """Number of this host."""
    port: int
    """Of torchrun's store on the first host."""


class Calibrated(Struct, frozen=True, kw_only=True):
    found: Measurements
    profile: Mapping[str, Any]
    """Data of a profile file."""
    notes: tuple[str, ...]


def hosts_at_hand(environ: Mapping[str, str]) -> Hosts:
    """Raises SpecError if a job step does not have one task on each of its nodes."""
    there = int(environ.get("SLURM_STEP_NUM_NODES", "1") or 1)
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1") or 1)
    if "SLURM_STEP_ID" not in environ or tasks == there == 1:
        return Hosts(names=("127.0.0.1",), rank=0, port=free_port("127.0.0.1"))
    if tasks != there:
        raise SpecError(
            f"the job step has {tasks} tasks on {there} nodes, but each node needs one",
            fix="srun --ntasks-per-node=1 ndctl calibrate --write FILE",
        )
    names = tuple(expand(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]))
    # All tasks must name the same port before they can talk to each other.
    port = FIRST_PORT + int(environ.get("SLURM_JOB_ID", "0")) % PORTS
    return Hosts(names=names, rank=int(environ.get("SLURM_NODEID", "0")), port=port)


def ranks_here(environ: Mapping[str, str], wish: int | None) -> int:
    return wish or len(visible_gpus(environ)) or 1


def measure(
    hosts: Hosts, ranks: int, budget_s: float, shell: Shell, python: str = sys.executable
) -> Measurements | None:
    """Run the ranks of this host. None on all hosts but the first.

    Raises:
        BackendError: they failed.
    """
    with TemporaryDirectory(prefix="ndctl-calibrate-") as folder:
        out = Path(folder) / "measurements.json"
        argv = torchrun(hosts, ranks, [str(out), str(budget_s)], python)
        try:
            done = shell(argv, timeout=budget_s + START_S)
        except TimeoutError as exc:
            raise BackendError(str(exc), fix="give fewer --ranks, or try again") from exc
        if done.code:
            raise BackendError(
                f"the measurement failed: {_last_error(done.err)}",
                fix="see the error; `--ranks 1` needs no other rank",
            )
        if hosts.rank:
            return None
        found: Measurements = msgspec.json.decode(out.read_bytes(), type=Measurements)
        return found


def torchrun(hosts: Hosts, ranks: int, arguments: list[str], python: str) -> list[str]:
    """As agents start ranks: the store listens at the address of the first host alone."""
    here = hosts.names[hosts.rank]
    return [
        *("env", "OMP_NUM_THREADS=1"),
        *command(python, "trainer.rank.torchrun"),
        f"--nnodes={len(hosts.names)}",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=ndctl",
        f"--rdzv-endpoint={hosts.names[0]}:{hosts.port}",
        f"--rdzv-conf=rank={hosts.rank}",
        f"--local-addr={here}",
        "--no-python",
        *command(python, "trainer.calibrate"),
        *arguments,
    ]


def _last_error(text: str) -> str:
    """The error of a rank. torchrun's own, which comes after it, only says that there was one."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line]
    own = [line for line in lines if "ChildFailedError" not in line]
    return (own or lines or [text.strip()[-200:]])[-1] or "no reason given"


def calibrated(found: Measurements, host: str, clock: Clock) -> Calibrated:
    base = base_of(found)
    day = datetime.fromtimestamp(clock.now(), UTC).date().isoformat()
    source = (
        f"ndctl calibrate on {host}, {day}: {found.hosts} x {found.ranks_per_host} ranks,"
        f" torch {found.torch}"
    )
    return Calibrated(found=found, profile=fit(found, base, source), notes=tuple(notes_of(found)))


def base_of(found: Measurements) -> Profile:
    """The profile of the device; for an unknown GPU one with its name."""
    if found.device == "cpu":
        return load_profile(CPU)
    for ending, name in MODELS.items():
        if re.search(rf"{ending}$", found.device_name):
            return load_profile(name)
    name = re.sub(r"[^a-z0-9]+", "-", found.device_name.lower()).strip("-")
    return nominal(found, load_profile(LIKE), name)


def write(made: Calibrated, path: Path) -> None:
    """Raises SpecError if `path` is not the name of a profile."""
    if path.suffix not in (".yaml", ".yml"):
        raise SpecError(f"--write must be the path of a .yaml file, got {path}", fix="name.yaml")
    heading = [f"{made.profile['name']} as it was measured here", *made.notes]
    write_whole(path, profile_text(made.profile, heading).encode())
