"""The local backend: each host is an agent process on this machine, in its own session."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread

from msgspec import Struct

from orchestrator.backends.host_processes import LEAVE_S, await_free, clear_host, end_holder
from orchestrator.contract.check_results import Finding
from orchestrator.contract.files import env
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError
from orchestrator.host_strikes import LOCAL
from orchestrator.inventory.local import visible_gpus
from orchestrator.posix.locks import is_held_alone, try_lock
from orchestrator.run_module import command
from orchestrator.seams import Clock, LaunchStatus


class AgentProcess(Struct, frozen=True, kw_only=True):
    """The command of one agent."""

    host: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """Added to the environment of the submitting process."""
    log: Path
    lock: Path


def render(launch: LaunchPlan, gpus: Sequence[str]) -> tuple[AgentProcess, ...]:
    """One agent per host, the leader first. `gpus`: devices that the job may use."""
    return tuple(
        _agent(launch, node, host, gpus, lead=host == launch.leader)
        for node, host in enumerate(launch.hosts)
    )


def _agent(
    launch: LaunchPlan, node: int, host: str, gpus: Sequence[str], *, lead: bool
) -> AgentProcess:
    run_dir = RunDir(Path(launch.run_dir))
    argv = (
        *command(sys.executable, "orchestrator.backends.entry.agent"),
        f"--run-dir={launch.run_dir}",
        f"--host={host}",
        "--address=127.0.0.1",
        "--bind=127.0.0.1",
        f"--launch={launch.launch}",
        f"--devices={launch.devices_per_host}",
        f"--agent-timeout={launch.agent_timeout}",
        *(("--lead",) if lead else ()),
    )
    devices = launch.devices_per_host
    mine = gpus[node * devices : (node + 1) * devices]
    visible = ",".join(mine) if len(launch.hosts) * devices <= len(gpus) else ""
    # Use the loopback interface. The host name of a laptop often has no address or a changing one,
    # and no other machine takes part in the job, so gloo and NCCL need not listen elsewhere.
    environ = {
        "CUDA_VISIBLE_DEVICES": visible,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **({env.LOCAL_GPUS: ",".join(gpus)} if gpus else {}),
    }
    return AgentProcess(
        host=host,
        argv=argv,
        environ=environ,
        log=run_dir.agent_log(host),
        lock=run_dir.agent_lock(host),
    )


QUEUE = "queue"
"""In the place of a host's name, for the process that waits for other jobs."""


def render_queue(launch: LaunchPlan) -> AgentProcess:
    """The process that starts the agents when the jobs of `launch.after` have succeeded."""
    argv = (
        *command(sys.executable, "orchestrator.backends.entry.local_queue"),
        f"--run-dir={launch.run_dir}",
        f"--launch={launch.launch}",
    )
    run_dir = RunDir(Path(launch.run_dir))
    return AgentProcess(
        host=QUEUE,
        argv=argv,
        environ={},
        log=run_dir.agent_log(QUEUE),
        lock=run_dir.agent_lock(QUEUE),
    )


class LocalBackend:
    """No scheduler grants these hosts, and they stay until the last agent exits."""

    granted = None
    successors = None
    unattended = None

    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        self.environ = environ
        self.clock = clock
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def fixed_hosts(self) -> "LocalBackend":
        return self

    def describe(self, handover: Handover) -> str:
        lines = []
        if handover.launch.after:
            queue = render_queue(handover.launch)
            lines.append(f"# waits, output to {queue.log}\n{shlex.join(queue.argv)}\n# then:")
        for agent in render(handover.launch, visible_gpus(self.environ)):
            setting = " ".join(
                f"{key}={shlex.quote(value)}" for key, value in agent.environ.items()
            )
            lines.append(
                f"# {agent.host}, output to {agent.log}\n{setting} {shlex.join(agent.argv)}"
            )
        return "\n".join(lines)

    def check(self, handover: Handover) -> tuple[Finding, ...]:
        return ()

    def submit(self, handover: Handover) -> None:
        launch = handover.launch
        self.clear(launch)
        if launch.after:
            self._start(render_queue(launch))
        else:
            self.start(launch)

    def start(self, launch: LaunchPlan) -> None:
        """Start the agents."""
        try:
            for agent in render(launch, visible_gpus(self.environ)):
                self._start(agent)
        except BackendError:
            # The agents that started would wait for the others.
            for process in self.started.values():
                process.kill()
                process.wait()
            raise
        # A notebook lives on, and each agent that it does not wait for would stay a zombie.
        started = tuple(self.started.values())
        Thread(target=_reap, args=(started,), name="reap-agents", daemon=True).start()

    def standing(self, launch: LaunchPlan) -> str | None:
        """Always None, because there is no queue. `submit` checks the locks of agents."""
        return None

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[LaunchStatus]:
        return [self._glimpse(launch) for launch in launches]

    def _glimpse(self, launch: LaunchPlan) -> LaunchStatus:
        """Asked about jobs without a leader only."""
        if _held(RunDir(Path(launch.run_dir))):
            return LaunchStatus("the leader is gone; an agent takes over", held=True, running=True)
        return LaunchStatus(None, held=False)

    def name_of(self, launch: LaunchPlan) -> str | None:
        return None

    def cluster(self) -> str:
        return LOCAL

    def known(self, hosts: Sequence[str]) -> tuple[str, ...]:
        return tuple(hosts)

    def replace(
        self,
        launch: LaunchPlan,
        host: str,
        *,
        elsewhere: bool = False,
        shut: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        former = self.started.pop(host, None)
        if former is not None:  # it may wait for the lock, so `end_holder` would not find it
            former.kill()
            former.wait()
        end_holder(RunDir(Path(launch.run_dir)).agent_lock(host), self.clock, leave_s=0.0)
        if host not in launch.hosts:
            raise BackendError(f"{host} is not a host of this launch", fix="report this bug")
        # A leader calls this, also one that was an agent when the agent of this host led.
        gpus, node = _gpus_of_job(self.environ), launch.hosts.index(host)
        self._start(_agent(launch, node, host, gpus, lead=False))

    def rival(self, launch: LaunchPlan) -> str | None:
        """Always None: the lock of a host keeps agents of another launch out."""
        return None

    def unbegun(self, launch: LaunchPlan, hosts: Sequence[str]) -> Mapping[str, str]:
        """Always empty: `submit` fails if an agent cannot start."""
        return {}

    def clear_host(self, launch: LaunchPlan, host: str) -> str:
        return clear_host(RunDir(Path(launch.run_dir)), host, self.clock)

    def clear(self, launch: LaunchPlan) -> None:
        run_dir = RunDir(Path(launch.run_dir))
        # An agent that loses its leader becomes the leader and starts another agent. So none may be
        # left, and all are told at once.
        while held := _held(run_dir):
            with ThreadPoolExecutor(len(held)) as pool:
                ended = partial(end_holder, clock=self.clock, leave_s=LEAVE_S)
                tuple(pool.map(ended, held))  # raises what one of them raised
        for lock in sorted(run_dir.logs.glob("ranks-*.lock")):
            await_free(lock, self.clock)

    def _start(self, agent: AgentProcess) -> None:
        try:
            agent.log.parent.mkdir(parents=True, exist_ok=True)
            with agent.log.open("ab") as out, _opened(agent.lock) as lock:
                # The agent holds it from here on, and not only when Python has started. Otherwise
                # nothing shows for seconds that the job starts, and nothing could end the agent.
                taken = try_lock(lock)
                process = subprocess.Popen(
                    (*agent.argv, f"--lock={lock}"),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env=_without_rank({**self.environ, **agent.environ}),
                    start_new_session=True,
                    pass_fds=(lock,),
                )
                if taken:
                    _write_pid(lock, process.pid)
        except OSError as exc:
            raise BackendError(f"failed to start the agent of {agent.host}: {exc}") from exc
        self.started[agent.host] = process


def _without_rank(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Without the mark of a rank's programs: a rank may submit a job that outlives its own."""
    return {name: value for name, value in environ.items() if name != env.TORCHRUN_PID}


def _gpus_of_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The devices of all hosts, as an agent knows them, which sees only those of its own."""
    return tuple(name for name in environ.get(env.LOCAL_GPUS, "").split(",") if name)


def _held(run_dir: RunDir) -> list[Path]:
    """The locks of the agents that live."""
    return [*filter(is_held_alone, sorted(run_dir.logs.glob("agent-*.lock")))]


@contextmanager
def _opened(lock: Path) -> Iterator[int]:
    fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_pid(lock: int, pid: int) -> None:
    with suppress(OSError):  # the disk may be full
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(pid).encode(), 0)


def _reap(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.wait()
