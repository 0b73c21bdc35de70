import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.by_name import backend_named
from orchestrator.backends.host_processes import pid_in
from orchestrator.backends.local import LocalBackend, render
from orchestrator.contract.files.env import TORCHRUN_PID
from orchestrator.contract.launch import LaunchPlan
from orchestrator.errors import BackendError
from orchestrator.journal.journal import has_writer
from orchestrator.run_module import command
from orchestrator.system import SystemClock, run_command
from tests.agent.world import WAIT_S, TurnedClock, is_gone, wait_for
from tests.backends.handover import handover_of

LOCK_HOLDER_SCRIPT = """
import fcntl, os, signal, sys, time
if len(sys.argv) > 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
os.ftruncate(fd, 0)
os.write(fd, str(os.getpid()).encode())
print("held", flush=True)
time.sleep(600)
"""


def launch(run_dir: Path, hosts: int = 3, devices: int = 2) -> LaunchPlan:
    return LaunchPlan(
        job="job",
        run_dir=str(run_dir),
        launch=4,
        hosts=tuple(f"host-{i}" for i in range(hosts)),
        devices_per_host=devices,
        agent_timeout=10.0,
    )


def argv(host: str, *more: str) -> tuple[str, ...]:
    return (
        *command(sys.executable, "orchestrator.backends.entry.agent"),
        "--run-dir=/runs/job",
        f"--host={host}",
        *("--address=127.0.0.1", "--bind=127.0.0.1", "--launch=4", "--devices=2"),
        *("--agent-timeout=10.0", *more),
    )


def test_each_host_and_spare_has_an_agent_and_the_first_leads() -> None:
    agents = render(launch(Path("/runs/job")), ())
    assert [agent.argv for agent in agents] == [
        argv("host-0", "--lead"),
        argv("host-1"),
        argv("host-2"),
    ]
    assert [agent.log.name for agent in agents] == [f"agent-host-{i}.log" for i in range(3)]
    for agent in agents:
        assert agent.environ == {
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }


@pytest.mark.parametrize(
    ("gpus", "slices"),
    [
        ("0 1 2 3 4 5 6 7", ["0,1", "2,3", "4,5"]),
        ("1 3 5 7 9 11", ["1,3", "5,7", "9,11"]),
        ("0 1 2 3 4", ["", "", ""]),
    ],
)
def test_each_host_sees_its_own_slice_of_the_gpus_or_none(gpus: str, slices: list[str]) -> None:
    agents = render(launch(Path("/runs/job")), gpus.split())
    assert [agent.environ["CUDA_VISIBLE_DEVICES"] for agent in agents] == slices


@pytest.mark.parametrize(
    ("visible", "first"), [("4,5,6,7,2,3", "4,5"), ("", ""), ("GPU-a, GPU-b", "")]
)
def test_only_gpus_that_the_submitter_may_use_are_taken(visible: str, first: str) -> None:
    backend = LocalBackend({"CUDA_VISIBLE_DEVICES": visible}, TurnedClock())
    shown = backend.describe(handover_of(launch(Path("/runs/job")))).splitlines()
    assert shown[0] == "# host-0, output to /runs/job/logs/agent-host-0.log"
    assert shown[1].startswith(f"CUDA_VISIBLE_DEVICES={first or chr(39) * 2} GLOO_SOCKET_IFNAME=lo")
    assert (f" NDCTL_LOCAL_GPUS={visible.replace(' ', '')} " in shown[1]) == bool(visible)
    assert shown[1].endswith("--agent-timeout=10.0 --lead")
    assert len(shown) == 6


def test_an_unknown_backend_is_an_error() -> None:
    assert isinstance(backend_named("local", {}, TurnedClock(), run_command), LocalBackend)
    with pytest.raises(BackendError, match="unknown backend: 'nomad'"):
        backend_named("nomad", {}, TurnedClock(), run_command)


@pytest.mark.process
def test_an_agent_that_leads_starts_agents_of_other_hosts_with_their_gpus_and_without_the_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "shown"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" "$@" > {shown}\n')
    python.chmod(0o755)
    first, *_, last = render(launch(tmp_path / "job"), ["0", "1", "2", "3", "4", "5"])
    # The agent of host-2 has taken over, and starts one on the host of the former leader.
    backend = LocalBackend({**os.environ, **last.environ}, SystemClock())
    assert last.environ["CUDA_VISIBLE_DEVICES"] == "4,5"
    monkeypatch.setattr(sys, "executable", str(python))
    backend.replace(launch(tmp_path / "job"), "host-0")
    wait_for(shown.exists, "the agent")
    assert backend.started["host-0"].wait(WAIT_S) == 0
    gpus, *args = shown.read_text().split()
    assert gpus == "0,1"
    assert args[:-1] == [*first.argv[1:-1]]
    assert args[-1].startswith("--lock=")
    assert first.argv[-1] == "--lead"


def test_a_host_outside_the_launch_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="host-9 is not a host"):
        LocalBackend({}, TurnedClock()).replace(launch(tmp_path), "host-9")


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[LocalBackend]:
    """A backend. The fixture kills the agents that it started."""
    backend = LocalBackend(os.environ, SystemClock())
    yield backend
    for process in backend.started.values():
        process.kill()
        process.wait(WAIT_S)


def sleeping_python(folder: Path) -> str:
    """Path of a program that ignores its arguments and sleeps."""
    python = folder / "python"
    python.write_text("#!/bin/sh\necho started\nexec sleep 600\n")
    python.chmod(0o755)
    return str(python)


def hold_lock(lock: Path, *more: str) -> "subprocess.Popen[bytes]":
    """Starts a process that holds `lock` as an agent does. With `stubborn`, it ignores SIGTERM."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LOCK_HOLDER_SCRIPT, str(lock), *more], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    process.stdout.close()
    return process


@pytest.mark.process
def test_replacing_an_agent_ends_the_old_one_first(
    tmp_path: Path, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hold_lock(tmp_path / "job" / "logs" / "agent-host-1.lock", "stubborn")
    monkeypatch.setattr(sys, "executable", sleeping_python(tmp_path))
    backend.replace(launch(tmp_path / "job"), "host-1")
    assert old.wait(WAIT_S) == -signal.SIGKILL
    (agent,) = backend.started.values()
    assert os.getsid(agent.pid) == agent.pid, "the agent must have a session of its own"
    log = tmp_path / "job" / "logs" / "agent-host-1.log"
    wait_for(lambda: log.read_text() == "started\n", "the new agent")


@pytest.mark.process
def test_an_agent_that_a_rank_starts_is_no_program_of_that_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ndctl submit` in a rank: the new job outlives the job of the rank."""
    backend = LocalBackend({**os.environ, TORCHRUN_PID: "1"}, SystemClock())
    monkeypatch.setattr(sys, "executable", sleeping_python(tmp_path))
    backend.replace(launch(tmp_path / "job"), "host-1")
    (agent,) = backend.started.values()
    try:
        assert TORCHRUN_PID.encode() not in Path(f"/proc/{agent.pid}/environ").read_bytes()
    finally:
        agent.kill()
        agent.wait(WAIT_S)


@pytest.mark.process
@pytest.mark.parametrize("stubborn", [False, True])
def test_clearing_terminates_agents_and_kills_one_that_ignores_it(
    tmp_path: Path, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, stubborn: bool
) -> None:
    lock = tmp_path / "logs" / "agent-host-0.lock"
    old = hold_lock(lock, *(["stubborn"] if stubborn else []))
    monkeypatch.setattr("orchestrator.backends.local.LEAVE_S", 0.3 if stubborn else WAIT_S)
    backend.clear(launch(tmp_path))
    assert old.wait(WAIT_S) == -(signal.SIGKILL if stubborn else signal.SIGTERM)
    assert not has_writer(lock)


@pytest.mark.process
def test_an_agent_counts_as_alive_before_it_runs_any_code(
    tmp_path: Path, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its imports take seconds on a busy machine."""
    monkeypatch.setattr(sys, "executable", sleeping_python(tmp_path))
    job = launch(tmp_path / "job", hosts=2)
    backend.submit(handover_of(job))
    (seen,) = backend.glance([job])
    assert seen.running
    started = {host: process.pid for host, process in backend.started.items()}
    logs = tmp_path / "job" / "logs"
    assert {host: pid_in(logs / f"agent-{host}.lock") for host in started} == started
    backend.clear(job)
    assert all(map(is_gone, started.values()))
    (seen,) = backend.glance([job])
    assert not seen.running


def test_clearing_also_waits_for_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    fd = os.open(logs / "ranks-host-0.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    backend = LocalBackend({}, TurnedClock())
    with pytest.raises(BackendError, match=r"running and hold .*ranks-host-0\.lock") as failed:
        backend.clear(launch(tmp_path))
    assert "fuser" in failed.value.fix
    os.close(fd)
    backend.clear(launch(tmp_path))


def test_an_agent_that_cannot_be_killed_is_an_error_with_its_pid(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    lock = logs / "agent-host-0.lock"
    dead = subprocess.Popen(["true"])
    dead.wait(WAIT_S)
    fd = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, str(dead.pid).encode())
    with pytest.raises(BackendError, match=f"agent process {dead.pid} of this job"):
        LocalBackend({}, TurnedClock()).clear(launch(tmp_path))
    os.close(fd)


@pytest.mark.process
def test_if_one_agent_cannot_start_the_others_are_ended(
    tmp_path: Path, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", sleeping_python(tmp_path))
    start = LocalBackend._start
    pids: list[int] = []

    def second_fails(self: LocalBackend, agent: object) -> None:
        if pids:
            Path(sys.executable).unlink()
        start(self, agent)  # type: ignore[arg-type]
        pids.extend(process.pid for process in self.started.values())

    monkeypatch.setattr(LocalBackend, "_start", second_fails)
    with pytest.raises(BackendError, match="failed to start the agent of host-1"):
        backend.submit(handover_of(launch(tmp_path / "job")))
    assert len(pids) == 1
    assert is_gone(pids[0])


def test_logs_that_cannot_be_written_are_a_backend_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(BackendError, match="failed to start the agent"):
        LocalBackend({}, TurnedClock()).submit(handover_of(launch(tmp_path)))
