"""What ranks write is said again, whole lines, each with its host and rank."""

import io
from pathlib import Path

import pytest

from orchestrator.agent.log_forwarder import LogForwarder, label
from orchestrator.contract.files.run_dir import RunDir


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("attempt-2/node-1/rank-13.log", "attempt 2 rank 13"),
        ("attempt-1/node-1/torchrun.log", "attempt 1 torchrun"),
    ],
)
def test_a_line_says_which_attempt_and_rank_it_is_of(path: str, said: str) -> None:
    assert label(Path(path)) == said


def test_lines_are_said_once_and_whole_and_none_of_a_former_agent(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    folder, other = run_dir.attempt_logs(1, "node-1"), run_dir.attempt_logs(1, "node-2")
    for one in (folder, other):
        one.mkdir(parents=True)
        (one / "rank-0.log").write_text("before\n")
    out = io.StringIO()
    echo = LogForwarder(run_dir, "node-1", out)
    with (folder / "rank-0.log").open("ab", buffering=0) as log:
        log.write(b"one\ntw")
        (other / "rank-0.log").write_text("not ours\n")
        echo.look()
        assert out.getvalue() == "[node-1 attempt 1 rank 0] one\n"
        log.write(b"o\n\xff\n")
        (folder / "torchrun.log").write_text("new\n")
        echo.look()
        echo.look()
    assert out.getvalue().split("\n")[1:] == [
        "[node-1 attempt 1 rank 0] two",
        "[node-1 attempt 1 rank 0] \ufffd",
        "[node-1 attempt 1 torchrun] new",
        "",
    ]


def test_what_comes_just_before_the_end_is_said(tmp_path: Path) -> None:
    run_dir, out = RunDir(tmp_path), io.StringIO()
    folder = run_dir.attempt_logs(3, "node-1")
    with LogForwarder(run_dir, "node-1", out):
        folder.mkdir(parents=True)
        (folder / "rank-7.log").write_text("last words\n")
    assert out.getvalue() == "[node-1 attempt 3 rank 7] last words\n"
