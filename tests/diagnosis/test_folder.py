"""Dumps and stacks in files: torch 2.13's own on gloo, as pickle and JSON, and hostile ones."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.diagnosis.analyse import analyse
from orchestrator.diagnosis.dumps import Unreadable, condense, parse
from orchestrator.diagnosis.folder import rank_of, read_folder
from orchestrator.diagnosis.stacks import main_stack, talks
from tests.diagnosis.standstill import standstill

FLIGHT = Path(__file__).parents[1] / "captured" / "flight"


def test_dumps_of_torch_name_the_rank_that_left_out_a_collective() -> None:
    """Four ranks on gloo; all but rank 3 called an all-reduce of all."""
    scene = read_folder(FLIGHT)
    assert sorted(scene.dumps) == [0, 1, 2, 3]
    verdict = analyse(scene)
    assert (verdict.kind, verdict.ranks) == ("never-entered", (3,))
    assert verdict.hosts == ()


def test_pickle_and_json_of_one_dump_say_the_same() -> None:
    raw = standstill(1, mesh=(2, 1, 2, 1, 2), fault="loader").raw
    for rank, dump in raw.items():
        pickled = condense(rank, parse(pickle.dumps(dump, protocol=2)))
        assert condense(rank, parse(json.dumps(dump).encode())) == pickled


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("ran",)


def test_a_pickle_that_would_run_code_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unreadable, match=r"builtins\.print"):
        parse(pickle.dumps({"entries": [Hostile()]}))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("data", [b"", b"\x80\x02", b"{", b"[1]", b'{"entries": 3}'])
def test_a_damaged_dump_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        parse(data)


def test_a_file_that_cannot_be_read_hinders_nothing(tmp_path: Path) -> None:
    shutil.copytree(FLIGHT, tmp_path / "dumps")
    (tmp_path / "dumps" / "trace_1").write_bytes(b"\x80torn")
    scene = read_folder(tmp_path / "dumps")
    assert (sorted(scene.dumps), list(scene.unreadable)) == ([0, 2, 3], ["trace_1"])
    assert analyse(scene).ranks == (3,)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("flight-12", 12),
        ("nccl_trace_rank_3", 3),
        ("rank-7.stacks", 7),
        ("trace_4.json", 4),
        ("rank5_of_16.pickle", 5),
        ("README", None),
    ],
)
def test_a_files_name_says_whose_it_is(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


def test_both_forms_of_stacks_are_read() -> None:
    faulthandler = (
        "Thread 0x01 (most recent call first):",
        '  File "/venv/threading.py", line 3 in wait',
        "Current thread 0x02 (most recent call first):",
        '  File "/venv/torch/distributed/distributed_c10d.py", line 3245 in all_reduce',
        '  File "/job/main.py", line 9 in <module>',
    )
    py_spy = (
        'Thread 7 (idle): "MainThread"',
        "    all_reduce (torch/distributed/distributed_c10d.py:3245)",
        "    <module> (main.py:9)",
    )
    for lines in (faulthandler, py_spy):
        stack = main_stack(lines)
        assert [frame.function for frame in stack] == ["all_reduce", "<module>"]
        assert talks(stack)


def test_the_command_says_who_and_how_it_is_known() -> None:
    shown = CliRunner().invoke(cli, ["diagnose", str(FLIGHT)])
    assert shown.exit_code == 0
    assert "rank 3 did not call what the others wait in" in shown.output
    assert "3 of 4 ranks are in, without rank 3" in shown.output
    found = json.loads(CliRunner().invoke(cli, ["diagnose", str(FLIGHT), "--json"]).output)
    assert (found["ranks"], found["hosts"], found["num_dumps"]) == ([3], [], 4)


def test_a_folder_without_evidence_is_an_error(tmp_path: Path) -> None:
    from orchestrator.errors import JobError

    result = CliRunner().invoke(cli, ["diagnose", str(tmp_path)])
    assert isinstance(result.exception, JobError)
