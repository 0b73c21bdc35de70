"""Several Unix users, none of them root, share a cluster and a run root."""

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from tests.e2e.job import ROOT, CommandResult, submit_args
from tests.slurm.e2e.two_node_job import NAME, SLOW_STEPS, STEPS, TESTBED_KNOBS, Job, job_on
from tests.slurm.testbed import SlurmTestbed, running_testbed

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]

USERS = ("games", "backup")
"""Users that every Debian has; they cannot write to their home directories."""


@dataclass(frozen=True)
class User:
    """`ndctl` run by another Unix user."""

    name: str
    python: str
    job: Job

    def __call__(self, *words: str) -> CommandResult:
        who = pwd.getpwnam(self.name)
        environ = {
            **self.job.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "HOME": who.pw_dir,
            "XDG_CONFIG_HOME": "",
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
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def submit(self, **options: str) -> CommandResult:
        return self(*submit_args("--backend=slurm", **{**SLOW_STEPS, **options}))


def shared_interpreter() -> str:
    """An interpreter of this version that other users can execute; this one may lie in a home."""
    version = f"python3.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        path = Path(candidate)
        if path.exists() and all(one.stat().st_mode & 0o001 for one in path.resolve().parents):
            return candidate
    pytest.skip(f"no {version} here that another user may run")


@pytest.fixture
def shared(slurm_available: None) -> Iterator[SlurmTestbed]:
    if os.getuid() != 0:
        pytest.skip("only root can act for other users")
    with running_testbed(nodes=2, gpus=1, knobs=TESTBED_KNOBS) as testbed:
        testbed.folder.chmod(0o755)
        yield testbed


@pytest.fixture
def run_root(shared: SlurmTestbed) -> Path:
    """A run root in the cluster's folder, because only root can enter the test's own folder."""
    folder = shared.folder / "runs"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def assert_refused(done: CommandResult, *words: str) -> None:
    assert done.code not in (exit_codes.OK, 1), done
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err, done


def test_two_users_share_a_run_root_and_neither_touches_the_other_s_job(
    shared: SlurmTestbed, run_root: Path
) -> None:
    python = shared_interpreter()
    with job_on(shared, run_root) as job:
        one, other = (User(name, python, job) for name in USERS)
        doctor = one("doctor", "--backend", "slurm")
        assert doctor.code == exit_codes.OK, doctor.out + doctor.err
        done = one.submit()
        assert done.code == exit_codes.OK, done.out + done.err
        job.wait_for_step(3)
        assert job.run_dir.owner() == USERS[0]
        assert job.slurm_job()["UserId"].startswith(USERS[0])

        listed = other("list")
        assert listed.code == exit_codes.OK, listed.err
        for words in (("status", NAME), ("cancel", NAME), ("logs", NAME)):
            assert_refused(other(*words), USERS[0])
        assert_refused(other.submit(), USERS[0])

        named = other.submit(name="another")
        assert named.code == exit_codes.OK, named.out + named.err
        assert other("cancel", "another").code == exit_codes.OK

        job.slurm.output_of("scontrol", "requeue", job.id)
        job.wait_for_end()
        # Losses are not compared: the data are files of the interpreter that both users share.
        assert sorted(job.losses()) == list(range(1, STEPS + 1))
        job.assert_succeeded_without_incident()


def test_a_run_root_that_a_user_may_not_enter_is_an_error(
    shared: SlurmTestbed, run_root: Path
) -> None:
    closed = run_root / "closed"
    closed.mkdir(mode=0o700)
    user = User(USERS[0], shared_interpreter(), Job(closed / "runs", shared))
    doctor = user("doctor", "--backend", "slurm")
    assert "Traceback" not in doctor.err, doctor.err
    assert f"{closed}/runs is in a folder that you cannot access" in doctor.out
    for words in (("status", NAME), ("cancel", NAME)):
        assert_refused(user(*words), f"you have no access to {closed}, which belongs to user root")
    assert_refused(user.submit(), str(closed))
