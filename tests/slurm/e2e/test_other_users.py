"""Several Unix users of one cluster and one run root, none of whom is root."""

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.contract import exits
from tests.e2e.job import ROOT, Done, submission
from tests.slurm.e2e.scheduler_job import NAME, TESTBED, WIDE, Job, job_on, uninterrupted
from tests.slurm.testbed import SlurmTestbed, running_testbed

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]

USERS = ("games", "backup")
"""That every Debian has; their homes are not theirs to write in."""


@dataclass(frozen=True)
class User:
    """`ndctl` as someone else types it."""

    name: str
    python: str
    job: Job

    def __call__(self, *words: str) -> Done:
        who = pwd.getpwnam(self.name)
        environ = {
            **self.job.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "HOME": who.pw_dir,
            "USER": self.name,
        }
        done = subprocess.run(
            [self.python, "-m", "orchestrator", *words],
            user=who.pw_uid,
            group=who.pw_gid,
            extra_groups=[],
            env=environ,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def submit(self, **options: str) -> Done:
        return self(*submission("--backend=slurm", **{**WIDE, **options}))


def an_interpreter_for_all() -> str:
    """One of this version that others may run: this one's may lie in a home."""
    version = f"python3.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        path = Path(candidate)
        if path.exists() and all(one.stat().st_mode & 0o001 for one in path.resolve().parents):
            return candidate
    pytest.skip(f"no {version} here that another user may run")


@pytest.fixture
def shared(slurm_there: None, tmp_path: Path) -> Iterator[SlurmTestbed]:
    if os.getuid() != 0:
        pytest.skip("only root can act for other users")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == "root" and folder != Path("/") and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    with running_testbed(nodes=2, gpus=1, knobs=TESTBED) as testbed:
        testbed.folder.chmod(0o755)
        yield testbed


def test_two_users_share_a_run_root_and_neither_touches_the_other_s_job(
    shared: SlurmTestbed, tmp_path: Path
) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    root.chmod(0o1777)
    python = an_interpreter_for_all()
    with job_on(shared, root) as job:
        one, other = (User(name, python, job) for name in USERS)
        doctor = one("doctor", "--backend", "slurm")
        assert doctor.code == exits.OK, doctor.out + doctor.err
        done = one.submit()
        assert done.code == exits.OK, done.out + done.err
        job.until_step(3)
        assert job.run_dir.owner() == USERS[0]
        assert job.shown()["UserId"].startswith(USERS[0])

        listed = other("list")
        assert listed.code == exits.OK, listed.err
        for words in (("status", NAME), ("cancel", NAME), ("logs", NAME)):
            refused = other(*words)
            assert refused.code not in (exits.OK, 1), (words, refused)
            assert USERS[0] in refused.err, (words, refused)
            assert "Traceback" not in refused.err
        again = other.submit()
        assert again.code not in (exits.OK, 1), again
        assert "Traceback" not in again.err
        assert USERS[0] in again.err

        named = other.submit(name="another")
        assert named.code == exits.OK, named.out + named.err
        assert other("cancel", "another").code == exits.OK

        job.slurm.told("scontrol", "requeue", job.id)
        job.until_ended()
        assert job.losses() == uninterrupted()
        job.assert_blameless()
