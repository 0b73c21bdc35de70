"""Flight recorders of the ranks of a job, built call by call, in torch's format."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.diagnosis.dumps.dump import RankDump, condense


class Pg(NamedTuple):
    """A process group. torch sets `desc` to `undefined` if it was created without a description."""

    name: str
    desc: str
    members: Sequence[int]


class Recorder:
    """The recorder of one rank. Entries of gloo stay `scheduled`, and its dumps list no members."""

    def __init__(self, rank: int, gloo: bool = False) -> None:
        self.rank = rank
        self.gloo = gloo
        self.entries: list[dict[str, Any]] = []
        self.groups: dict[str, Pg] = {}
        self.numbers: dict[str, int] = {}

    def call(
        self, group: Pg, op: str = "all_reduce", state: str = "completed", size: int = 4
    ) -> None:
        assert self.rank in group.members
        self.groups[group.name] = group
        number = self.numbers[group.name] = self.numbers.get(group.name, 0) + 1
        over = state == "completed"
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": int(group.name),
                "process_group": (group.name, group.desc),
                "collective_seq_id": number,
                "p2p_seq_id": 0,
                "op_id": number,
                "profiling_name": f"{'gloo' if self.gloo else 'nccl'}:{op}",
                "time_created_ns": len(self.entries),
                "input_sizes": [[size]],
                "input_dtypes": ["Float"],
                "output_sizes": [[size]],
                "output_dtypes": ["Float"],
                "state": "scheduled" if self.gloo else state,
                "time_discovered_started_ns": None if self.gloo or state == "scheduled" else 1,
                "time_discovered_completed_ns": 2 if over and not self.gloo else None,
                "retired": over,
                "timeout_ms": 600_000,
                "is_p2p": False,
                "thread_id": "1",
                "thread_name": "python",
            }
        )

    def dump(self) -> dict[str, Any]:
        config = {
            name: {"name": name, "desc": group.desc, "ranks": str(list(group.members))}
            for name, group in self.groups.items()
        }
        return {
            "version": "2.10",
            "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}} if self.gloo else config,
            "pg_status": {},
            "entries": self.entries,
        }


def recorders(world: int, gloo: bool = False) -> list[Recorder]:
    return [Recorder(rank, gloo) for rank in range(world)]


def dumps_of(ranks: Iterable[Recorder], lost: Sequence[int] = ()) -> Mapping[int, RankDump]:
    """Reduced dumps of all ranks except those in `lost`."""
    return {one.rank: condense(one.rank, one.dump()) for one in ranks if one.rank not in lost}


def stack(*frames: tuple[str, str]) -> tuple[str, ...]:
    """Lines of a stack as faulthandler writes them, from (file, function), innermost first."""
    lines = (f'  File "{file}", line 9 in {function}' for file, function in frames)
    return ("Current thread 0x01 (most recent call first):", *lines)


MAIN = ("/a/train.py", "<module>")
IN_ALL_REDUCE = stack(("/v/torch/distributed/distributed_c10d.py", "all_reduce"), MAIN)
IN_LOADER = stack(("/a/data.py", "read"), MAIN)
IN_BACKWARD = stack(("/v/torch/autograd/graph.py", "_engine_run_backward"), MAIN)
