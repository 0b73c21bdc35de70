"""`ndctl.log` and `ndctl.phase`: what arrives at the agent and in the run directory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import ndctl
from orchestrator.contract.messages import rank_messages
from orchestrator.contract.messages.events import CheckpointFailed, CheckpointSaved, TrainingResumed
from orchestrator.contract.messages.rank_messages import Beat

pytestmark = pytest.mark.process


def run(script: str, folder: Path, **environ: str) -> list[Any]:
    """Run `script` as a rank; the decoded messages that its agent gets."""
    path = folder / "agent.sock"
    (folder / "fence.json").write_text(json.dumps({"leader": "a", "attempt": 3}))
    known = {"NDCTL_HEARTBEAT_SOCKET": str(path), "NDCTL_RUN_DIR": str(folder)}
    messages = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind(str(path))
        agent.settimeout(0.05)
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **known, "NDCTL_ATTEMPT": "3", **environ},
        )
        ended = False
        while True:
            try:
                messages.append(rank_messages.from_bytes(agent.recv(1 << 16)))
            except TimeoutError:
                if ended:  # all that it has sent is read
                    break
                ended = process.poll() is not None
    path.unlink()
    assert process.returncode == 0
    return messages


LOG = """
import ndctl
ndctl.log(7, loss=2.5, learning_rate=1e-3, tokens=12, split="train", ratio=float("nan"))
ndctl.log(8)
"""


def test_rank_0_writes_a_line_of_metrics_and_every_rank_a_heartbeat(tmp_path: Path) -> None:
    first, second = run(LOG, tmp_path)
    assert first == Beat(attempt=3, rank=0, step=7, phase="train", loss=2.5)
    assert second == Beat(attempt=3, rank=0, step=8, phase="train")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    times = [line.pop("time") for line in lines]
    assert times == sorted(times)
    more = {"learning_rate": 0.001, "tokens": 12, "split": "train", "ratio": None}
    assert lines == [
        {"attempt": 3, "step": 7, "loss": 2.5, **more},
        {"attempt": 3, "step": 8, "loss": None},
    ]
    (beat, _) = run(LOG, tmp_path, RANK="1", WORLD_SIZE="2")
    assert beat == Beat(attempt=3, rank=1, step=7, phase="train")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_rank_of_an_old_attempt_writes_no_line(tmp_path: Path) -> None:
    run(LOG, tmp_path, NDCTL_ATTEMPT="2")
    assert (tmp_path / "metrics.jsonl").read_text() == ""


PHASES = """
import os, ndctl
ndctl.log(4)
with ndctl.phase("eval"):
    with ndctl.phase("write"):
        pass
if os.fork() == 0:
    ndctl.log(99)          # a worker of a data loader
    with ndctl.phase("eval"):
        os._exit(0)
os.wait()
"""


def test_phases_nest_and_a_forked_worker_reports_nothing(tmp_path: Path) -> None:
    beats = run(PHASES, tmp_path)
    assert [beat.phase for beat in beats] == ["train", "eval", "write", "eval", "train"]
    assert {beat.step for beat in beats} == {4}


SAVES = """
import os, ndctl
folder = ndctl.latest_checkpoint()
assert (folder and folder.name) == os.environ.get("EXPECTED"), folder
for step in (2, 3, 4):
    with ndctl.checkpoint(step) as own:
        (own / "weights").write_text(str(step))
    assert folder or ndctl.latest_checkpoint().name == f"step-{step}"
try:
    with ndctl.checkpoint(5):
        1 / 0
except ndctl.CheckpointError:
    pass
"""


def test_saves_and_resumes_are_events_of_the_job(tmp_path: Path) -> None:
    keep = json.dumps({"keep": 1, "keep_every": 3, "verify": True})
    messages = run(SAVES, tmp_path, NDCTL_KEEP=keep)
    assert [one for one in messages if not isinstance(one, Beat)] == [
        TrainingResumed(attempt=3, step=0),
        CheckpointSaved(attempt=3, step=2),
        CheckpointSaved(attempt=3, step=3),
        CheckpointSaved(attempt=3, step=4),
        CheckpointFailed(
            attempt=3, step=5, why="rank 0 raised ZeroDivisionError: division by zero"
        ),
    ]
    phases = [one.phase for one in messages if isinstance(one, Beat)]
    assert phases == ["checkpoint", "init"] * 4
    kept = {path.name for path in (tmp_path / "checkpoints").glob("step-?")}
    assert kept == {"step-3", "step-4"}

    resumed = run(SAVES, tmp_path, EXPECTED="step-4", NDCTL_KEEP=keep)
    skipped = [("step-5.partial-3", "its write was interrupted")]
    assert isinstance(resumed[0], TrainingResumed)
    assert resumed[0].step == 4
    assert [(one.name, one.why) for one in resumed[0].passed_over] == skipped
    # A fresh start takes none, though the folder has some.
    assert run(SAVES, tmp_path, NDCTL_RESUME="none")[0] == TrainingResumed(attempt=3, step=0)


ALONE = """
import ndctl
ndctl.log(1, loss=0.5)
with ndctl.phase("eval"): pass
assert ndctl.attempt == 1 and ndctl.latest_checkpoint() is None and not ndctl.should_stop()
for step in (1, 2, 3):
    with ndctl.checkpoint(step) as own:
        (own / "weights").write_text("w")
assert ndctl.latest_checkpoint().name == "step-3"
"""


def test_without_ndctl_a_script_keeps_all_checkpoints_in_its_folder_and_writes_nothing_else(
    tmp_path: Path,
) -> None:
    plain = {name: text for name, text in os.environ.items() if not name.startswith("NDCTL")}
    subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, env=plain, check=True, timeout=60)
    assert {path.name for path in tmp_path.rglob("*")} == {
        *("checkpoints", "step-1", "step-2", "step-3", "weights", "COMPLETE")
    }


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ndctl.log(-1), "give the number of steps done"),
        (lambda: ndctl.log(True), "give the number of steps done"),
        (lambda: ndctl.log(cast("int", 1.5)), "give the number of steps done"),
        (lambda: ndctl.log(1, time=3), "time is written by ndctl"),
        (
            lambda: ndctl.phase(cast("Any", "evaluate")).__enter__(),
            "use one of init, compile, train",
        ),
    ],
)
def test_a_wrong_call_says_what_to_give(call: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        call()


@pytest.mark.parametrize("value", ["x", [1], torch.ones(2)])
def test_a_metric_that_is_no_number_is_refused_without_ndctl_too(value: Any) -> None:
    with pytest.raises(TypeError, match=r"loss is .*; give a number"):
        ndctl.log(1, loss=value)


INTEGERS = """
import ndctl, numpy
ndctl.log(numpy.int64(5), loss=10**400, tokens=10**5000, count=12)
"""


def test_a_step_may_be_an_integer_of_numpy_and_a_huge_number_is_not_finite(tmp_path: Path) -> None:
    (beat,) = run(INTEGERS, tmp_path)
    assert (beat.step, beat.loss) == (5, None)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert [line[key] for key in ("step", "loss", "tokens", "count")] == [5, None, None, 12]


def test_a_metric_that_is_no_number_is_refused_and_a_tensor_is_one(tmp_path: Path) -> None:
    script = "import ndctl\ntry: ndctl.log(1, accuracy=[1])\nexcept TypeError as exc: print(exc)\n"
    path = tmp_path / "script.py"
    path.write_text(script)
    known = {"NDCTL_HEARTBEAT_SOCKET": "/nowhere", "NDCTL_RUN_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "accuracy is [1]; give a number" in done.stdout
    assert isinstance(torch.tensor(1.5), ndctl.log.__globals__["SupportsFloat"])


EVERY_NAME = """
import sys
sys.path.insert(0, sys.argv[1])
import ndctl
for name in ("attempt", *ndctl._SCRIPT):
    getattr(ndctl, name)
import ndctl.rank.line_file, ndctl.rank.checkpoint_files
"""


def test_names_for_scripts_need_the_standard_library_alone() -> None:
    root = str(Path(ndctl.__file__).parents[1])
    subprocess.run([sys.executable, "-I", "-S", "-c", EVERY_NAME, root], check=True, timeout=60)
