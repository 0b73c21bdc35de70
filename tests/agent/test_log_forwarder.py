"""Lines that ranks write are printed again, each with its host, attempt and rank."""

import io
from pathlib import Path

import pytest

from orchestrator.agent.log_forwarder import LogForwarder, label
from orchestrator.contract.files.run_dir import RunDir


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("attempt-2/node-1/rank-13.log", "attempt 2 rank 13"),
        ("attempt-1/node-1/torchrun.log", "attempt 1 torchrun"),
    ],
)
def test_a_line_starts_with_its_attempt_and_rank(path: str, expected: str) -> None:
    assert label(Path(path)) == expected


def test_new_lines_are_forwarded_once_and_whole(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    folder, other = run_dir.attempt_logs(1, "node-1"), run_dir.attempt_logs(1, "node-2")
    for one in (folder, other):
        one.mkdir(parents=True)
        (one / "rank-0.log").write_text("before\n")
    out = io.StringIO()
    forwarder = LogForwarder(run_dir, "node-1", out)
    with (folder / "rank-0.log").open("ab", buffering=0) as log:
        log.write(b"one\ntw")
        (other / "rank-0.log").write_text("not ours\n")
        forwarder.look()
        assert out.getvalue() == "[node-1 attempt 1 rank 0] one\n"
        log.write(b"o\n\xff\n")
        (folder / "torchrun.log").write_text("new\n")
        forwarder.look()
        forwarder.look()
    assert out.getvalue().split("\n")[1:] == [
        "[node-1 attempt 1 rank 0] two",
        "[node-1 attempt 1 rank 0] \ufffd",
        "[node-1 attempt 1 torchrun] new",
        "",
    ]


def test_the_last_lines_before_the_end_are_forwarded(tmp_path: Path) -> None:
    run_dir, out = RunDir(tmp_path), io.StringIO()
    folder = run_dir.attempt_logs(3, "node-1")
    with LogForwarder(run_dir, "node-1", out):
        folder.mkdir(parents=True)
        (folder / "rank-7.log").write_text("last words\n")
    assert out.getvalue() == "[node-1 attempt 3 rank 7] last words\n"
