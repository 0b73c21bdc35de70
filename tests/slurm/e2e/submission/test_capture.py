"""A job of the user's own script runs the version that was submitted, whatever is edited later."""

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.job import kill, wait_for
from tests.slurm.e2e.slurm_job import SlurmNdctl

pytestmark = [pytest.mark.slurm, pytest.mark.process]
SCRIPT = """
import json, os, sys, time
from pathlib import Path
import trainer
from orchestrator import loops
here = Path(__file__).parent
rate = json.loads((here / "rate.json").read_text())
with open(f"rank-{os.environ['RANK']}.txt", "a") as out:
    out.write(f"{VERSION} {trainer.VERSION} {loops.VERSION} {rate} {sys.path[0] == str(here)}\\n")
while not Path("go").exists():
    time.sleep(0.1)
"""
OUTPUT = "rank-0.txt"


def write_version(home: Path, number: int) -> None:
    """The script, and modules that have the names of packages of ndctl."""
    (home / "train.py").write_text(SCRIPT.replace("VERSION", str(number), 1))
    (home / "orchestrator").mkdir(exist_ok=True)
    for name in ("trainer.py", "orchestrator/loops.py"):
        (home / name).write_text(f"VERSION = {number}\n")
    (home / "rate.json").write_text(str(number))


def spec_in(folder: Path, home: Path) -> str:
    run = {"script": "train.py", "workdir": str(home)}
    # The job stays in the queue for some seconds, in which the user edits the script.
    slurm = {"sbatch_args": ["--begin=now+5"]}
    cluster = {"backend": "slurm", "hosts": 2, "gpus_per_host": 1, "slurm": slurm}
    resilience = {"agent_timeout": 5, "stop_grace": 5}
    spec = {"name": "e2e", "run": run, "cluster": cluster, "resilience": resilience}
    path = folder / "spec.yaml"
    path.write_text(json.dumps(spec))
    return str(path)


def lines(home: Path, count: int) -> list[str]:
    """What rank 0 has written, one line for each start."""

    def read() -> list[str]:
        path = home / OUTPUT
        found = path.read_text().splitlines() if path.exists() else []
        return found if len(found) >= count else []

    found: list[str] = wait_for(read, f"{count} lines in {OUTPUT}", 120)
    return found


# In every run tests/trainer/program/test_captured.py runs scripts from their copy.
@pytest.mark.slow
def test_edits_after_submission_change_neither_the_start_nor_a_restart_but_a_resumed_job(
    ndctl: SlurmNdctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    # sbatch hands it on. No process of ndctl itself imports what is there.
    monkeypatch.setenv("PYTHONPATH", str(home))
    (home / ".git").mkdir(parents=True)
    (home / ".env").write_text("TOKEN=secret")
    (home / ".gitignore").write_text("data/\n")
    (home / "data").mkdir()
    (home / "data" / "large.bin").touch()
    write_version(home, 1)
    spec = spec_in(tmp_path, home)
    done = ndctl("submit", spec)
    assert done.code == 0, done.out + done.err
    assert f"ranks run a copy of 5 files, 0.0 MB, of {home} (without .env, data/)" in done.err
    assert not ndctl.metrics()
    write_version(home, 2)

    first = "1 1 1 1 True"
    assert lines(home, 1) == [first]
    kill(wait_for(lambda: ndctl.ranks().get(0), "rank 0"))
    assert lines(home, 2) == [first, first]
    copy = ndctl.run_dir / "capture-1"
    assert {path.name for path in copy.iterdir()} - {"__pycache__"} == {
        *(".gitignore", "orchestrator", "rate.json", "trainer.py", "train.py")
    }
    assert f"runs        {copy}, copied from {home} at submission" in ndctl("describe", "e2e").out

    assert ndctl("cancel", "e2e").code == 0
    ndctl.wait_for_end("CANCELLED")
    (home / "go").touch()
    done = ndctl("submit", spec, "--resume", "--set", "cluster.slurm.sbatch_args=[]")
    assert done.code == 0, done.out + done.err
    assert f"ranks run a new copy of 8 files, 0.0 MB, of {home}" in done.err
    ndctl.wait_for_end()
    assert lines(home, 3) == [first, first, "2 2 2 2 True"]
    assert (ndctl.run_dir / "capture-2" / "trainer.py").read_text() == "VERSION = 2\n"
    assert signal.SIGKILL in [event.get("signal") for event in ndctl.events("RankExited")]


def test_a_refused_submission_leaves_no_copy(ndctl: SlurmNdctl, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    write_version(home, 1)
    with (home / "data" / "tokens.bin").open("wb") as file:
        file.truncate(300 * 10**6)
    spec = spec_in(tmp_path, home)
    done = ndctl("submit", spec)
    assert done.code == 6
    assert "The largest so far: data (1 files, 300 MB)" in done.err
    assert "run.capture to false" in done.err
    assert not ndctl.run_dir.exists()
    assert not ndctl.testbed.output_of("squeue", "-h")
    done = ndctl("submit", spec, "--dry-run", "--set", "run.capture=false")
    assert done.code == 0, done.err
    (home / ".ndctlignore").write_text("/data/\n")
    done = ndctl("submit", spec, "--dry-run")
    assert "run.capture: ranks run a copy of 5 files" in done.out, done.err
    # Slurm refuses it after the copy is made.
    ndctl.testbed.output_of("scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=fan")
    done = ndctl("submit", spec, "--set", "cluster.slurm.sbatch_args=[--mem-per-cpu=800G]")
    assert done.code == 6, done.err
    assert "Slurm refused this job" in done.err
    assert not ndctl.run_dir.exists()
