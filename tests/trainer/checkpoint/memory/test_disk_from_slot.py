"""Checkpoints on the disk are written from a slot, which does not change meanwhile."""

import dataclasses
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from ndctl.rank.memory.available import HostRoom
from orchestrator.agent.memory.slots import MemorySlots
from orchestrator.contract.files.checkpoint_names import Made
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.memory.peers import CopyPlan, HostMemory, Peer
from orchestrator.contract.memory.slot_file import SENT, label_of, set_mark
from orchestrator.contract.spec.job_spec import MemoryCheckpointSpec
from tests.agent.processes.test_torchrun import START
from tests.trainer.checkpoint.checkpoint_launch import differing, tensors_of, with_fence
from tests.trainer.launch.tiny_runs import losses_of, tiny, work
from trainer.checkpoint.memory import saves
from trainer.checkpoint.memory.copying import OnHost
from trainer.checkpoint.memory.opened import Digests, OpenMemory
from trainer.checkpoint.memory.partners import Partners
from trainer.checkpoint.memory.saves import PRESSURE_S, MemoryCheckpoints
from trainer.checkpoint.memory.slot import Slot, layout_of, slots_of
from trainer.checkpoint.state import PROGRESS, Origin, Progress, Stream, TrainingState
from trainer.data.ledger import NOTHING
from trainer.rank.ranks import Ranks
from trainer.rank.reporter import Reporter
from trainer.step import NO_NEWS, Totals

START_ALONE = replace(START, ranks_per_host=1)
PEER = Peer(host="other", address="127.0.0.1", port=1)


def totals(memory: MemoryCheckpoints, *, agreed: bool) -> Totals:
    """What a step says of one rank, or of several of which another one is not done."""
    return Totals(
        loss=1.0, z_loss=0.0, tokens=1.0, grad_norm=1.0, stop=False, save_failed=False, every=0,
        remembered=memory.is_done and agreed, remember_every=0,
        share_ended=memory.partners.has_ended, share_failed=memory.partners.has_failed,
        read=NOTHING,
    )  # fmt: skip


class OneRank:
    """A rank whose weights are all equal to its step, so that a slot's content says its step."""

    def __init__(self, copies: int) -> None:
        self.owner = MemorySlots()
        self.records: list[Callable[[], None]] = []
        """What waits until the records are written."""
        plan = CopyPlan(partners=(PEER,) * copies)
        self.memory: HostMemory = self.owner.of_attempt(START_ALONE, plan)
        self.weight = nn.Parameter(torch.zeros(64))
        no_mesh: Any = None
        ranks = Ranks(env=RankEnv(attempt=2), device=torch.device("cpu"), mesh=no_mesh, data_rank=0)
        stream = Stream(seed=0, global_batch_size=1, sequence_length=1, data="d")
        state = TrainingState(
            parameters=[("weight", self.weight)],
            optimizer=torch.optim.SGD([self.weight]),
            stream=stream,
            origin=Origin(),
            ranks=ranks,
        )
        self.reporter = Reporter(ranks.env)
        layout = layout_of({**state.tensors(), **state.random()})
        slots = slots_of(self.memory, 0)
        for slot in slots:
            slot.reserve(layout)
        spec = MemoryCheckpointSpec(every=1)
        opened = OpenMemory(
            memory=self.memory, slots=slots, spec=spec, digests=Digests("c", "h"), others=[]
        )
        self.saves = MemoryCheckpoints(
            opened=opened,
            state=state,
            lineage=2,
            written=self.records.append,
            layout=layout,
            copying=OnHost(),
            partners=Partners(copies, lambda *_: None, None),
            reporter=self.reporter,
            slots=list(slots),
            every=1,
        )

    def train(self, step: int, *, agreed: bool, records: int) -> None:
        """`records`: of how many copies they are written. `agreed`: other ranks are done."""
        self.saves.thread.submit(lambda: None).result()
        for then in self.records[:records]:
            then()
        del self.records[:records]
        self.saves.after_step(0.1, totals(self.saves, agreed=agreed))
        self.weight.data.fill_(float(step))

    def close(self) -> None:
        self.saves.close()
        self.reporter.close()
        self.owner.close()

    def files(self) -> Iterator[int]:
        for slot in range(4 if self.memory.copies else 3):
            file = self.owner.file(0, slot)
            assert file is not None
            yield file

    def complete(self) -> set[Made]:
        """The slots that say they are complete, each with the content that it says."""
        self.saves.thread.submit(lambda: None).result()
        made = set()
        for slot in self.saves.slots:
            if (header := slot.header()) is not None:
                assert slot.digest(header.table) == header.digest, header.made
                made.add(header.made)
        return made

    def send(self) -> None:
        """What the agent does: all partners have the slot."""
        for file in self.files():
            label = label_of(file)
            if label is not None and label.made == self.saves.partners.made:
                set_mark(file, SENT)


@pytest.mark.parametrize("copies", [0, 1])
def test_no_copy_overwrites_what_is_written_sent_or_the_newest_that_all_ranks_have(
    copies: int,
) -> None:
    random = Random(copies)
    for _ in range(20):
        rank = OneRank(copies)
        train_randomly(rank, random)
        rank.close()


def train_randomly(rank: OneRank, random: Random) -> None:
    """Steps after which any rank may be late, agents may have sent, and saves to the disk may come
    one after another."""
    on_disk: dict[str, Any] | None = None
    written = 0
    common: Made | None = None
    for step in range(1, 40):
        newest = rank.saves.newest
        rank.train(step, agreed=random.random() < 0.8, records=random.choice([0, 0, 1, 3]))
        if rank.saves.agreed and newest is not None:
            common = Made(step=newest, attempt=2)
        if random.random() < 0.3:
            on_disk, written = rank.saves.save_for_disk(step), step
        elif rank.saves.due(step):
            rank.saves.save(step)
        if on_disk is not None:
            assert on_disk["model.weight"].unique().tolist() == [written]
            assert Progress.from_json(on_disk[PROGRESS]).step == written
        assert common is None or common in rank.complete()
        slot, made = rank.saves.partners.slot, rank.saves.partners.made
        if slot is not None and made is not None:
            assert rank.saves.holds[slot.path] == made.step
        if random.random() < 0.3:
            rank.send()


@pytest.mark.parametrize("copies", [0, 1])
def test_a_rank_that_gives_up_frees_all_slots_but_the_one_that_is_written_to_the_disk(
    copies: int,
) -> None:
    rank = OneRank(copies)
    rank.train(1, agreed=True, records=0)
    on_disk = rank.saves.save_for_disk(1)
    assert on_disk is not None
    rank.train(2, agreed=True, records=0)
    rank.saves.after_step(0.1, dataclasses.replace(totals(rank.saves, agreed=True), forgets=True))
    rank.saves.thread.submit(lambda: None).result()
    for then in rank.records:
        then()  # the records of a copy are written only now
    used = [slot for slot in rank.saves.slots if slot.size]
    assert used == [rank.saves.written_to_disk]
    assert on_disk["model.weight"].unique().tolist() == [1.0]
    assert not rank.saves.due(9)
    assert not rank.saves.save_for_stop(9)
    assert rank.saves.save_for_disk(9) is None, "from now on the disk has a buffer of its own"
    rank.saves.thread.submit(lambda: None).result()
    assert not rank.complete()
    assert rank.owner.num_bytes == 0
    rank.close()


def test_a_rank_gives_up_when_its_host_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = OneRank(0)
    rank.saves.save(1)
    assert not rank.saves.news(NO_NEWS).forgets
    for free, gives_up in ((6, False), (4, True)):
        monkeypatch.setattr(saves, "host_room", lambda free=free: HostRoom(100 << 30, free << 30))
        rank.saves.looked = -PRESSURE_S  # it looks once a second
        assert rank.saves.news(NO_NEWS).forgets is gives_up
    assert "has only 4.0 of 100.0 GiB left" in rank.saves.trouble
    rank.close()


def test_a_slot_that_the_kernel_refuses_is_a_reason_to_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    rank = OneRank(0)
    monkeypatch.setattr(Slot, "reserve", refuse)
    assert not rank.saves.save(1)
    assert rank.saves.news(NO_NEWS).forgets
    assert "Cannot allocate memory" in rank.saves.trouble
    rank.close()


@pytest.mark.process
@pytest.mark.xdist_group("saves")
def test_a_checkpoint_from_a_slot_is_the_same_as_without_checkpoints_in_memory(
    tmp_path: Path,
) -> None:
    """Ranks train on and copy each step, while the disk takes three steps for each save."""
    cases = []
    for name, every in (("without", "off"), ("with", 1)):
        checkpoint = {"every_steps": 5, "memory": {"every": every, "copies": 0}}
        config = tiny(tmp_path / name, steps=14, parallel={"dp_shard": 2}, checkpoint=checkpoint)
        cases.append({"config": with_fence(config), "slow": 3})
    worker = "tests.trainer.checkpoint.memory.disk_worker"
    without, with_memory = work(tmp_path, 2, cases, worker=worker)
    assert without["code"] == with_memory["code"] == 0
    assert without["copies"] == [0, 0], "steps 5 and 10, in which no slot is there"
    assert min(with_memory["copies"]) > 0
    assert (without["buffered"], with_memory["buffered"]) == (2, 0), "no second copy was made"
    assert losses_of(tmp_path / "with") == losses_of(tmp_path / "without")
    for step in (14, 10):
        found = [tensors_of(tmp_path / name / "checkpoints") for name in ("with", "without")]
        assert differing(*found) == []
        for name in ("with", "without"):
            newest = tmp_path / name / "checkpoints" / f"step-{step}"
            newest.rename(newest.with_name(f"aside-{step}"))
