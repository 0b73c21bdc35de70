"""The memory that the agent of this host gave to a rank, and what its content must agree with."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.distributed as dist

from orchestrator.contract.codec import decode, encode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.memory.peers import HostMemory
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.job_spec import NOT_ON_GPUS, MemoryCheckpointSpec
from trainer.checkpoint.memory.slot import Slot, slots_of
from trainer.rank.ranks import Ranks
from trainer.rank.reporter import Reporter

LOG = logging.getLogger("trainer")

FORMAT = 4
"""Of the slots. Another one is not read."""
OF_THE_PLAN = (
    "micro_batch_size",
    "activation_checkpointing",
    "compile",
    "float8",
    "loss_chunks",
)
"""Keys of `train` that a new plan of the same job may change. The state does not depend on them."""


@dataclass(frozen=True, slots=True)
class Digests:
    """What a slot must agree with."""

    config: str
    """Of all on which the shards of a rank depend."""
    history: str
    """Of all on which the state of the whole job depends, whatever mesh it is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMemory:
    """The slots that the agent of this host gave to this rank."""

    memory: HostMemory
    slots: Sequence[Slot]
    spec: MemoryCheckpointSpec
    digests: Digests
    others: list[Slot]
    """The slots on this host of other plans that this rank serves, besides its own."""

    def close(self) -> None:
        """Called last."""
        for slot in (*self.slots, *self.others):
            slot.close()


def open_memory(
    spec: MemoryCheckpointSpec, ranks: Ranks, digests: Digests, reporter: Reporter
) -> OpenMemory | None:
    """None on all ranks if the spec says so, or if one of them cannot have it. A collective."""
    if spec.every == "off":
        return None
    opened, why = None, ""
    if spec.on_devices(cpu=ranks.device.type != "cuda").every == "off":
        why = NOT_ON_GPUS
    elif not ranks.env.memory:
        why = "they need the agents of ndctl, which did not start these ranks"
    else:
        try:
            opened = _open(spec, ranks, digests)
        except OSError as exc:
            why = f"rank {ranks.env.rank} cannot open its memory on {ranks.env.host}: {exc}"
    if is_off(why, spec, ranks, reporter):
        return None
    return opened


def _open(spec: MemoryCheckpointSpec, ranks: Ranks, digests: Digests) -> OpenMemory:
    memory: HostMemory = decode(HostMemory, read_json(ranks.env.memory))
    if memory.why:
        raise OSError(memory.why)
    return OpenMemory(
        memory=memory,
        slots=slots_of(memory, ranks.env.local_rank),
        spec=spec,
        digests=digests,
        others=[*_of_other_plans(memory, ranks, digests)],
    )


def _of_other_plans(memory: HostMemory, ranks: Ranks, digests: Digests) -> Iterator[Slot]:
    # The ranks of a host share the work.
    for path in memory.others[ranks.env.local_rank :: ranks.env.local_world_size]:
        slot = Slot(path)
        header = slot.header()
        if header is None or header.config == digests.config:
            slot.close()
        else:
            yield slot


def is_off(why: str, spec: MemoryCheckpointSpec, ranks: Ranks, reporter: Reporter) -> bool:
    """Whether any rank gives a reason not to use the memory. A collective."""
    reasons: list[str] = [""] * ranks.env.world_size
    dist.all_gather_object(reasons, why)
    first = next((reason for reason in reasons if reason), "")
    if first:
        say_off("" if ranks.env.rank else first, spec, ranks, reporter)
    return bool(first)


def say_off(why: str, spec: MemoryCheckpointSpec, ranks: Ranks, reporter: Reporter) -> None:
    """Called on all ranks, which keep no checkpoints in memory from now on.

    Args:
        why: for the log and the journal; empty: another rank says it.
    """
    if why:
        # Nobody has asked for `auto`, so nothing is missing that somebody relies on.
        level = logging.INFO if spec.every == "auto" else logging.WARNING
        LOG.log(level, "no checkpoints in memory: %s", why)
        reporter.memory_set(None, 0, why)
    if ranks.env.local_rank == 0:
        reporter.copies_ended()


def digests_of(config: TrainingConfig) -> Digests:
    """Any changed key changes the digest of the shards, also one that does not matter: then parts
    of all slots are read, which is never wrong. So does another version of torch or ndctl, which
    may lay out or name the state in another way; those slots are not read at all."""
    versions = (torch.__version__, version("ndctl"), FORMAT)
    train = {key: value for key, value in encode(config.train).items() if key not in OF_THE_PLAN}
    whole = (encode(config.model), encode(config.data), train)
    return Digests(_digest(encode(config), *versions), _digest(*whole, *versions))


def _digest(*values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()
