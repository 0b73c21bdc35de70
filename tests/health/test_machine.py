import errno
import fcntl
import os
import re
import resource
import shutil
import socket
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from orchestrator.contract.check_results import Finding
from orchestrator.contract.plan import IN_MEMORY, Plan
from orchestrator.health.machine import EARLIEST, NEEDED, describe_findings, examine
from orchestrator.posix.fd_limit import files_needed
from orchestrator.seams import Completed
from orchestrator.system import SystemClock, run_command
from tests.agent.world import WAIT_S, TurnedClock, a_plan
from tests.nfs_locks.byte_ranges import flock

ROOT = Path(__file__).parents[2]


class FakeShell:
    """A machine with one program, timedatectl, which gives a configured answer."""

    def __init__(self, answer: Completed | None) -> None:
        self.answer = answer

    def __call__(self, argv: Sequence[str], /, *, timeout: float) -> Completed:
        assert argv[0] == "timedatectl"
        if self.answer is None:
            raise TimeoutError
        return self.answer


def look(
    root: Path,
    what: str,
    plan: Plan | None = None,
    answer: Completed | None = None,
    environ: dict[str, str] | None = None,
    now: float = 1_800_000_000.0,
) -> Finding:
    """The finding about `what`."""
    found = examine(root, plan, environ or {}, FakeShell(answer), TurnedClock(now))
    return next(finding for finding in found if finding.what == what)


def test_a_machine_that_runs_these_tests_can_run_a_job(tmp_path: Path) -> None:
    synchronised = FakeShell(Completed(0, "yes\n", ""))
    found = examine(tmp_path / "runs", a_plan(), os.environ, synchronised, TurnedClock())
    assert [finding for finding in found if finding.verdict == "stops"] == []
    assert not (tmp_path / "runs").exists(), "it looks, and changes nothing"
    assert list(tmp_path.iterdir()) == []
    names = [finding.what for finding in found]
    assert names[:6] == ["system", "torch", "transformers", "aiohttp", "cores", "memory"]
    assert names[6:] == [
        *("disk", "run root", "scratch", "ports", "open files", "clock", "sbatch", "kubectl")
    ]


def test_on_another_system_only_that_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    (found,) = examine(tmp_path, None, {}, FakeShell(None), TurnedClock())
    assert (found.what, found.verdict) == ("system", "stops")
    assert "run ndctl on Linux" in found.fix


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.13.0+cpu", "ok"),
        ("2.13", "ok"),
        ("2.13rc1", "ok"),
        ("3.0.0.dev20260101+cu130", "ok"),
        ("2.12.1", "stops"),
        (None, "stops"),
    ],
)
def test_packages_must_be_there_and_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, verdict: str
) -> None:
    real = metadata.version

    def installed(name: str) -> str:
        if name != "torch":
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    found = look(tmp_path, "torch")
    assert found.verdict == verdict
    assert found.fix == "pip install 'torch>=2.13'"
    assert (version or "not installed") in found.found


def test_a_plan_with_more_ranks_than_cores_will_be_slow(tmp_path: Path) -> None:
    assert look(tmp_path, "cores", a_plan(1)).verdict == "ok"
    found = look(tmp_path, "cores", a_plan(64, 8))
    assert found.verdict == "warns"
    assert "for 512 ranks" in found.found


def test_a_plan_too_large_for_memory_cannot_run(tmp_path: Path) -> None:
    assert look(tmp_path, "memory").verdict == "ok"
    found = look(tmp_path, "memory", a_plan(10_000))
    assert found.verdict == "stops"
    assert "10000 ranks need about" in found.found


def test_checkpoints_in_memory_that_do_not_fit_are_no_reason_to_stop(tmp_path: Path) -> None:
    """Ranks then keep fewer of them."""
    plan = a_plan(1)
    assert plan.memory is not None
    for gib, words in ((0.01, "for checkpoints in memory"), (100_000, "fewer or none of those")):
        host = {**plan.memory.host, IN_MEMORY: int(gib * (1 << 30))}
        found = look(tmp_path, "memory", replace(plan, memory=replace(plan.memory, host=host)))
        assert found.verdict == "ok"
        assert words in found.found


def test_a_disk_must_hold_the_checkpoints_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = (1 << 30) + 3 * (1 << 20) * 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert look(tmp_path, "disk", a_plan(2)).verdict == "ok"
    found = look(tmp_path, "disk", a_plan(3))
    assert found.verdict == "stops"
    assert str(tmp_path) in found.found


def test_a_run_root_must_be_a_folder_to_write_in(tmp_path: Path) -> None:
    assert look(tmp_path / "a" / "b", "run root").verdict == "ok"
    file = tmp_path / "file"
    file.write_text("")
    found = look(file, "run root")
    assert found.verdict == "stops"
    assert "--run-root" in found.fix


def test_locks_are_tried_as_agents_use_them(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With other locks than theirs, folders of agents that live look abandoned, and are removed.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("scratch")))

    def nfs_without_lockd(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def ignored(file: int, operation: int) -> None:
        pass

    def without_shared_locks(file: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, operation)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    assert look(tmp_path, "run root").verdict == "ok"
    for broken, said in (
        (nfs_without_lockd, "No locks available"),
        (ignored, "file locks do not work"),
        (without_shared_locks, "Bad file descriptor"),
    ):
        monkeypatch.setattr(fcntl, "flock", broken)
        found = look(tmp_path, "run root")
        assert (found.verdict, said in found.found) == ("stops", True)
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_directory_too_deep_for_an_agents_socket_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look(tmp_path, "scratch").verdict == "ok"
    # Just deep enough that an agent's own path has the 108 bytes that no socket may have.
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    short = len("/tmp/ndctl-agent-12345678/ranks.sock")
    deep = Path("/tmp") / f"ndctl-test-{os.getpid()}".ljust(107 - short, "x")
    deep.mkdir()
    try:
        monkeypatch.setattr("tempfile.tempdir", str(deep))
        found = look(tmp_path, "scratch")
    finally:
        deep.rmdir()
    assert found.verdict == "stops"
    assert "TMPDIR" in found.fix


def test_loopback_must_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(tmp_path, "ports").verdict == "ok"

    def refused(*_: object, **__: object) -> None:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(socket, "create_connection", refused)
    assert look(tmp_path, "ports").verdict == "stops"


def test_fewer_open_files_than_the_job_needs_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hard limit decides, because the soft limit is raised to it."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert look(tmp_path, "open files").verdict == "ok"
    needed = files_needed(2048, 2048)
    looked = examine(tmp_path, None, {}, FakeShell(None), TurnedClock(0.0), needed)
    found = next(finding for finding in looked if finding.what == "open files")
    words = "hard limit 4096, the first host of the job needs 8448"
    assert (found.verdict, found.found) == ("warns", words)
    assert "raise it to 8448" in found.fix


@pytest.mark.parametrize(
    ("answer", "verdict", "found"),
    [
        (Completed(0, "yes\n", ""), "ok", "synchronized"),
        (Completed(0, "no\n", ""), "warns", "not synchronized"),
        (Completed(127, "", "no such program"), "note", "set; synchronization unknown"),
        (None, "note", "set; timedatectl timed out"),
    ],
)
def test_a_clock_is_asked_whether_it_is_synchronised(
    tmp_path: Path, answer: Completed | None, verdict: str, found: str
) -> None:
    finding = look(tmp_path, "clock", answer=answer)
    assert (finding.verdict, finding.found) == (verdict, found)


def test_a_clock_that_was_never_set_is_reported(tmp_path: Path) -> None:
    found = look(tmp_path, "clock", now=60.0)
    assert found.verdict == "warns"
    assert "never set" in found.found


def test_schedulers_are_noted(tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert look(tmp_path, "sbatch", environ=path).found == str(sbatch)
    missing = look(tmp_path, "kubectl", environ=path)
    assert (missing.verdict, missing.found) == ("note", "not on PATH; only needed for Kubernetes")


def test_findings_are_lines_and_only_problems_have_a_fix() -> None:
    findings = [
        Finding(what="disk", verdict="ok", found="9.0 GiB free", fix="free some"),
        Finding(what="open files", verdict="warns", found="limit 256", fix="ulimit -n 1024"),
        Finding(what="sbatch", verdict="note", found="not on PATH"),
        Finding(what="ports", verdict="stops", found="loopback: refused", fix="ip link set lo up"),
    ]
    assert describe_findings(findings).splitlines() == [
        "   ok  disk           9.0 GiB free",
        "warns  open files     limit 256",
        "                      fix: ulimit -n 1024",
        " note  sbatch         not on PATH",
        "stops  ports          loopback: refused",
        "                      fix: ip link set lo up",
    ]


# The real shell and clock


@pytest.mark.process
def test_a_command_runs_to_its_end() -> None:
    script = r"echo out; printf '\377' >&2; exit 3"
    assert run_command(["sh", "-c", script], timeout=WAIT_S) == Completed(3, "out\n", "\ufffd")


@pytest.mark.process
def test_a_users_slurm_variables_change_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    habits = ["SBATCH_PARTITION", "SCANCEL_STATE", "SCONTROL_ALL", "SINFO_FORMAT", "SQUEUE_STATES"]
    habits += ["SLURM_MPI_TYPE", "SLURM_EXCLUSIVE", "SRUN_EXPORT_ENV", "SLURM_THREADS_PER_CORE"]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for name in (*habits, "SLURM_TIME_FORMAT", "SLURM_CONF", "NDCTL_X"):
        monkeypatch.setenv(name, "x")
    seen = run_command(["env"], timeout=WAIT_S).out.splitlines()
    names = {line.partition("=")[0] for line in seen}
    assert {"PATH", "SLURM_CONF", "NDCTL_X"} <= names
    assert not {*habits, "SLURM_TIME_FORMAT"} & names
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    inside = {line.partition("=")[0] for line in run_command(["env"], timeout=WAIT_S).out.split()}
    assert {*habits} & inside == {"SLURM_THREADS_PER_CORE"}, "it may be an option of the job"


def test_a_missing_or_forbidden_program_gives_code_127(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    for program in ("no-such-program-here", str(plain), str(plain / "below")):
        done = run_command([program], timeout=WAIT_S)
        assert done.code == 127
        assert done.err


@pytest.mark.process
def test_a_command_that_does_not_end_is_a_timeout() -> None:
    with pytest.raises(TimeoutError, match="sleep did not end within 0 s"):
        run_command(["sleep", "60"], timeout=0.05)


def test_the_clock_advances() -> None:
    clock = SystemClock()
    before, now = clock.monotonic(), clock.now()
    clock.sleep(0.001)
    assert clock.monotonic() > before
    assert now > EARLIEST


def test_doctor_asks_for_the_versions_that_the_package_needs() -> None:
    """A doctor that accepted torch 2.11 would pass a machine on which no rank starts."""
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(given), re.MULTILINE)
    least = {name: tuple(map(int, version.split("."))) for name, version in found}
    assert {name: least[name] for name in NEEDED} == NEEDED
