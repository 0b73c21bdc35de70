"""Flight recorder dumps of simulated ranks: one all-reduce over all ranks per step."""

from functools import lru_cache

from orchestrator.diagnosis.dumps.dump import Call, GroupId, GroupProgress, Op, RankDump
from orchestrator.diagnosis.dumps.dump_summary import to_text

OP = Op("all_reduce", "[[1024]]", "[[1024]]", "float32")


@lru_cache(maxsize=512)
def dump_of(rank: int, world: int, step: int, *, behind: bool) -> str:
    """The dump while the collective of the step after `step` waits. `behind`: it waits for this
    rank."""
    group = GroupId("0", "default_pg", tuple(range(world)))
    entered = step if behind else step + 1
    calls = tuple(Call(seq, OP, started=True) for seq in range(max(1, step), entered + 1))
    seat = GroupProgress(entered=entered, done=step, calls=calls)
    dump = RankDump(rank, {group: seat}, (), group, None if behind else group)
    return to_text(dump)
