"""The disk of the run directory is full, and a rank is killed meanwhile.

The job waits for room, reports it, and resumes without losing a step.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.job import ROOT, WAIT_S, CommandResult, Ndctl, assert_nothing_left, kill, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.xdist_group("e2e"),
    pytest.mark.timeout(1800),
]

PROGRAM = (sys.executable, "-m", "orchestrator")
SIZE_MIB = 60
INSIDE = ("unshare", "--mount", "sh", "-c")
ENDLESS = {"train__steps": "100000", "checkpoint__every_steps": "10"}


@dataclass(frozen=True)
class OnSmallDisk(Ndctl):
    """`ndctl` in a mount namespace whose run root is a small file system.

    `run_root` is the path from outside, through the process that holds the mount.
    """

    holder: int
    inside: Path

    def __call__(
        self, *words: str, timeout: float = WAIT_S, given: str | None = None
    ) -> CommandResult:
        done = subprocess.run(
            ["nsenter", f"--target={self.holder}", "--mount", *PROGRAM, *words],
            env={**os.environ, "NDCTL_RUN_ROOT": str(self.inside), "COLUMNS": "100"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            input=given,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def ndctl(tmp_path: Path) -> Iterator[OnSmallDisk]:
    mount = f"mount -t tmpfs -o size={SIZE_MIB}m none {tmp_path}"
    tried = subprocess.run([*INSIDE, mount], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"a file system cannot be mounted here: {tried.stderr.strip()}")
    hold = f"{mount} && touch {tmp_path}/mounted && exec sleep infinity"
    holder = subprocess.Popen([*INSIDE, hold])
    seen = Path(f"/proc/{holder.pid}/root{tmp_path}")
    try:
        wait_for((seen / "mounted").exists, "the mount", 60)
        command = OnSmallDisk(run_root=seen, holder=holder.pid, inside=tmp_path)
        yield command
        command("cancel", "e2e")
        assert_nothing_left(tmp_path / "e2e")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()


def test_a_full_disk_and_a_killed_rank_lose_nothing(ndctl: OnSmallDisk) -> None:
    done = ndctl.submit(**ENDLESS)
    assert done.code == 0, done.out + done.err
    wait_for(lambda: ndctl.events("CheckpointSaved"), "a checkpoint")
    with (ndctl.run_root / "filler").open("wb") as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(1 << 16))
            filler.flush()
    known = ndctl.losses()
    kill(_rank(ndctl))
    # The leader cannot write to the journal, so the error is in its log or in the status.
    output = wait_for(lambda: _full(ndctl), "a message about the full disk", 120)
    assert "No space left" in output
    assert not ndctl.has_ended()

    (ndctl.run_root / "filler").unlink()
    wait_for(lambda: len(ndctl.events("TrainingResumed")) > 1, "the next attempt")
    steps = ndctl.num_steps()
    wait_for(lambda: ndctl.num_steps() > steps, "a step of the next attempt")
    now = ndctl.losses()
    again = known.keys() & now.keys()
    assert {step: known[step] for step in again} == {step: now[step] for step in again}
    (incident,) = ndctl.status()["incidents"]
    assert (incident["kind"], incident["evidence"]["signal"]) == ("rank-killed", "SIGKILL")
    resumed = ndctl.events("TrainingResumed")[-1]["step"]
    assert resumed == max(
        saved["step"] for saved in ndctl.events("CheckpointSaved") if saved["attempt"] == 1
    )


def _rank(ndctl: OnSmallDisk) -> int:
    return Ndctl(ndctl.inside).rank_pid(1)


def _full(ndctl: OnSmallDisk) -> str:
    out = ndctl("status", "e2e").out
    logs = "".join(path.read_text() for path in (ndctl.run_dir / "logs").glob("agent-*.log"))
    return out if "No space left" in out else logs if "No space left" in logs else ""
