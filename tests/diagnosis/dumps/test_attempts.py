"""Of the dumps of several attempts or jobs in one folder, the newest consistent set is used."""

import gzip
import os
import pickle
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.app.diagnose_job import diagnose_folder
from orchestrator.cli import cli
from orchestrator.diagnosis.dumps.load_evidence import read_folder
from orchestrator.diagnosis.hang.analyse import analyse
from tests.diagnosis.recorder import Pg, recorders

FLIGHT = Path(__file__).parents[2] / "captured" / "flight"
NOW = 1_800_000_000


def hung(world: int, late: int, at_s: float, *, gloo: bool = False) -> dict[int, dict[str, Any]]:
    """Dumps of a job in which rank `late` did not call the last operation."""
    group = Pg("0", "default_pg", range(world))
    ranks = recorders(world, gloo)
    for one in ranks:
        for _ in range(5):
            one.call(group)
        if one.rank != late:
            one.call(group, state="scheduled")
    raw = {one.rank: one.dump() for one in ranks}
    for dump in raw.values():
        for place, called in enumerate(dump["entries"]):
            called["time_created_ns"] = int((at_s + place) * 1e9)
    return raw


def written(folder: Path, form: str, raw: dict[int, Any], ranks: Iterable[int]) -> None:
    for rank in ranks:
        (folder / form.format(rank)).write_bytes(pickle.dumps(raw[rank], protocol=2))


@pytest.mark.parametrize("gloo", [False, True])
def test_dumps_of_two_attempts_with_equal_names_use_the_newer(tmp_path: Path, gloo: bool) -> None:
    """Rank 5 has a dump of an hour ago only, which would show it as the late rank."""
    old, new = hung(6, 1, NOW - 3600, gloo=gloo), hung(6, 2, NOW, gloo=gloo)
    written(tmp_path, "nccl_trace_rank_{}", old, [5])
    written(tmp_path, "nccl_trace_rank_{}", new, range(5))
    scene = read_folder(tmp_path)
    assert sorted(scene.dumps) == [0, 1, 2, 3, 4]
    assert list(scene.passed_over) == ["nccl_trace_rank_5"]
    assert "of an earlier attempt or job: its newest operation is 3,600 s older" in str(
        scene.passed_over
    )
    assert analyse(scene).ranks == (2,)


@pytest.mark.parametrize("gloo", [False, True])
def test_dumps_of_two_attempts_with_different_names_use_the_newer(
    tmp_path: Path, gloo: bool
) -> None:
    """The older dump comes first by name."""
    written(tmp_path, "a1-rank{}", hung(4, 1, NOW - 600, gloo=gloo), range(4))
    written(tmp_path, "a2-rank{}", hung(4, 2, NOW, gloo=gloo), range(4))
    scene = read_folder(tmp_path)
    assert analyse(scene).ranks == (2,)
    assert sorted(scene.passed_over) == [f"a1-rank{rank}" for rank in range(4)]


def test_dumps_of_two_jobs_of_different_size_are_not_mixed(
    tmp_path: Path,
) -> None:
    written(tmp_path, "trace_{}", hung(8, 6, NOW), range(4, 8))
    written(tmp_path, "trace_{}", hung(4, 2, NOW + 1), range(4))
    scene = read_folder(tmp_path)
    assert sorted(scene.dumps) == [0, 1, 2, 3]
    assert analyse(scene).ranks == (2,)
    assert "of another job: it has 8 ranks" in scene.passed_over["trace_4"]


def test_dumps_of_two_jobs_of_equal_size_are_not_mixed(tmp_path: Path) -> None:
    written(tmp_path, "mine_{}", hung(4, 1, NOW + 1), [1, 3])
    written(tmp_path, "theirs_{}", hung(4, 2, NOW), range(4))
    scene = read_folder(tmp_path)
    assert sorted(scene.dumps) == [1, 3]
    assert set(scene.passed_over) == {f"theirs_{rank}" for rank in range(4)}


def test_a_dump_of_a_rank_that_was_late_for_long_belongs_to_the_attempt(tmp_path: Path) -> None:
    """The calls of its peers overlap in time with its last calls."""
    raw = hung(4, 2, NOW)
    for rank in (0, 1, 3):
        raw[rank]["entries"][-1]["time_created_ns"] += int(3600e9)
    written(tmp_path, "trace_{}", raw, range(4))
    scene = read_folder(tmp_path)
    assert (analyse(scene).ranks, dict(scene.passed_over)) == ((2,), {})


def test_an_empty_dump_is_dated_by_its_file(tmp_path: Path) -> None:
    raw = hung(4, 2, NOW)
    for dump in raw.values():
        dump["entries"] = [one for one in dump["entries"] if one["state"] != "completed"]
    written(tmp_path, "_dump_{}", raw, range(4))
    assert analyse(read_folder(tmp_path)).ranks == (2,)
    hour_ago = (tmp_path / "_dump_2").stat().st_mtime - 3600
    os.utime(tmp_path / "_dump_2", (hour_ago, hour_ago))
    scene = read_folder(tmp_path)
    assert list(scene.passed_over) == ["_dump_2"]
    assert 2 not in scene.dumps


# Other formats of the same evidence


def test_dumps_and_stacks_in_other_formats_are_read(tmp_path: Path) -> None:
    for path in FLIGHT.iterdir():
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    stack = 'Current thread 0x1 (most recent call first):\n  File "data.py", line 3 in read\n'
    (tmp_path / "rank-3.log").write_text("step 4\nFatal Python error: Aborted\n\n" + stack)
    (tmp_path / "rank-2.log").write_text("step 4\n")
    (tmp_path / "slurm-88123.out").write_text("step 4\n")
    (tmp_path / "rank-1.tar.gz").write_bytes(b"")
    scene = read_folder(tmp_path)
    assert sorted(scene.dumps) == [0, 1, 2, 3]
    assert scene.facts[3].stack
    assert scene.passed_over == {
        "rank-2.log": "a log without a stack",
        "rank-1.tar.gz": "an archive: unpack it first",
    }
    _, found = diagnose_folder(tmp_path)
    assert (found.ranks, found.evidence[1:]) == ((3,), ("its stack is in read (data.py:3)",))


def test_stack_files_have_priority_over_stacks_in_a_log(tmp_path: Path) -> None:
    form = 'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in {}\n'
    (tmp_path / "rank-3.log").write_text(form.format("old"))
    (tmp_path / "rank-3.stacks").write_text(form.format("new"))
    scene = read_folder(tmp_path)
    assert "new" in str(scene.facts[3].stack)
    assert scene.passed_over == {"rank-3.log": "second stacks of rank 3; rank-3.stacks is used"}


def test_the_command_accepts_a_single_file(tmp_path: Path) -> None:
    shutil.copy(FLIGHT / "trace_1", tmp_path / "trace_1")
    shown = CliRunner().invoke(cli, ["diagnose", str(tmp_path / "trace_1")])
    assert shown.exit_code == 0, shown.output
    assert "dumps of 1 rank" in shown.output
    assert "operation 4 of default_pg" in shown.output or "waiting" in shown.output
