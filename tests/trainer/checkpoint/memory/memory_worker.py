"""Looks for the newest step in memory on several ranks.

A case has `steps`: for each rank, the steps in its slots, the older first; `torn`: a rank whose
newer slot is not complete; `flipped`: a rank one bit of whose newer slot changes; `skip`: first and
last batch of data to skip; `resumed`: step and attempt of a resume since; `attempts`: the one in
which each rank's slots were made; and `lineage` and `config`, if they are not those of the slots.
The answer has the step and the names of skipped ones.
"""

from pathlib import Path
from typing import Any

import torch

from orchestrator.agent.memory.slots import MemorySlots
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.memory.peers import CopyPlan, HostMemory
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.messages.agent_protocol import Start
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.job_spec import MemoryCheckpointSpec
from tests.trainer.launch.training_worker import arranged
from trainer.checkpoint.memory.find import newest_in_memory
from trainer.checkpoint.memory.opened import Digests, OpenMemory
from trainer.checkpoint.memory.slot import Header, Slot, layout_of, slots_of
from trainer.checkpoint.state import Progress, Stream

STREAM = Stream(seed=0, global_batch_size=1, sequence_length=1, data="d")
START = Start(
    attempt=2,
    node_rank=0,
    nodes=1,
    ranks_per_host=1,
    master_address="",
    master_port=1,
    config="",
    drills=(),
    lineage=1,
)


def run_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    owner = MemorySlots()  # each rank plays the only rank of its own host
    memory = owner.of_attempt(START, CopyPlan())
    slots = slots_of(memory, 0)
    for slot, step in zip(slots, case["steps"][env.rank], strict=False):
        write(slot, step, env.rank, case.get("attempts", [1, 1])[env.rank])
    newer = slots[len(case["steps"][env.rank]) - 1]
    if case.get("torn") == env.rank:
        newer.clear()
    if case.get("flipped") == env.rank:
        flip(newer)
    skip = [Window(first=case["skip"][0], last=case["skip"][1])] if "skip" in case else []
    asked = HostMemory(
        lineage=case.get("lineage", 1),
        slots=memory.slots,
        resumed=(Made(*case["resumed"]),) if "resumed" in case else (),
    )
    digests = Digests(case.get("config", "c"), case.get("history", "h"))
    spec = MemoryCheckpointSpec()
    opened = OpenMemory(memory=asked, slots=slots, spec=spec, digests=digests, others=[])
    found, skipped = newest_in_memory(opened, arranged(Mesh(dp_shard=2), env), skip)
    owner.close()
    step = None if found is None else found.header.made.step
    return {"step": step, "skipped": [f"{one.name}: {one.why}" for one in skipped]}


def write(slot: Slot, step: int, rank: int, attempt: int) -> None:
    state = {"model.weight": torch.full((4, 5), float(step + rank))}
    layout = layout_of(state)
    slot.reserve(layout)
    slot.write(layout, state)
    header = Header(
        lineage=1,
        made=Made(step=step, attempt=attempt),
        rank=rank,
        ranks=2,
        config="c",
        history="h",
        digest=slot.digest(layout.table),
        digest_at=layout.table[0].offset,
        progress=Progress(step=step, stream=STREAM).to_json(),
        table=layout.table,
    )
    slot.complete(header)


def flip(slot: Slot) -> None:
    header = slot.header()
    assert header is not None
    with Path(slot.path).open("r+b") as file:
        file.seek(header.table[0].offset)
        file.write(b"\x01")
