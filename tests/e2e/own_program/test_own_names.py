"""A script whose folder has a `trainer.py` and an `orchestrator`, as many projects have."""

from pathlib import Path

import pytest

from tests.e2e.job import Ndctl, assert_nothing_left

pytestmark = pytest.mark.process
FILES = {
    "trainer.py": """
import torch
from orchestrator.schedule import rate
class Trainer:
    def __init__(self):
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate())
    def fit(self, step):
        self.model(torch.ones(1, 4)).square().mean().backward()
        self.optimizer.step()
""",
    "orchestrator/schedule.py": "def rate():\n    return 0.01\n",
    "train.py": """
import pickle, time
import torch.distributed as dist
import ndctl
from trainer import Trainer
dist.init_process_group("gloo")
trainer = Trainer()
first = 0
if (folder := ndctl.latest_checkpoint()) is not None:
    first = pickle.loads((folder / f"{dist.get_rank()}.pickle").read_bytes())["step"]
for step in range(first + 1, 31):
    trainer.fit(step)
    ndctl.log(step, loss=0.5)
    with ndctl.checkpoint(step) as folder:
        (folder / f"{dist.get_rank()}.pickle").write_bytes(pickle.dumps({"step": step}))
    time.sleep(0.05)
print("done by", Trainer.__module__, "from", first, flush=True)
""",
}


def test_a_script_gets_its_own_modules_and_is_supervised_as_ever(tmp_path: Path) -> None:
    home, ndctl = tmp_path / "home", Ndctl(tmp_path / "runs")
    for name, text in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    words = ("run", "--name", "mine", "--gpus-per-host", "2", "--drill", "kill:rank=1@step=12")
    done = ndctl(*words, "--follow", "--", str(home / "train.py"))
    assert done.code == 0, done.out + done.err
    assert "rank 1 was killed by SIGKILL" in done.out
    assert "steps       30\n" in done.out
    run = ndctl.run_root / "mine"
    last = (run / "logs" / "attempt-2" / "host-0" / "rank-0.log").read_text()
    assert "done by trainer from 1" in last, last  # it resumed at step 10 to 12
    assert "trainer" not in (run / "imports.json").read_text()
    assert_nothing_left(run)


def test_the_folder_trainer_can_be_the_program(tmp_path: Path) -> None:
    """`python -m trainer.task` is how Vertex AI starts a training."""
    home, ndctl = tmp_path / "home", Ndctl(tmp_path / "runs")
    (home / "trainer").mkdir(parents=True)
    for name in ("__init__", "model"):
        (home / "trainer" / f"{name}.py").write_text("SIZE = 8\n")
    task = "from trainer.model import SIZE\nprint('task of size', SIZE)\n"
    (home / "trainer" / "task.py").write_text(task)
    workdir = ("--set", f"run.workdir={home}")
    done = ndctl("run", "--name", "task", "--follow", *workdir, "--", "-m", "trainer.task")
    assert done.code == 0, done.out + done.err
    log = ndctl.run_root / "task" / "logs" / "attempt-1" / "host-0" / "rank-0.log"
    assert log.read_text() == "task of size 8\n"
