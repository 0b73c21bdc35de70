"""Hosts played by processes of this machine: one agent each, in a session of its own."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cluster.local import visible_gpus
from orchestrator.contract.handover import Handover
from orchestrator.contract.launch import Allocation, Cause, LaunchPlan
from orchestrator.contract.rundir import RunDir
from orchestrator.entry import command
from orchestrator.errors import BackendError
from orchestrator.locks import is_free, is_held_alone
from orchestrator.seams import Clock, HostNotice, Sighting
from orchestrator.strikes import LOCAL

LEAVE_S = 15.0
"""For an agent that was told to go (SIGTERM) before it is killed."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProcess:
    """What starts one agent."""

    host: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """Added to the environment of whoever submits."""
    log: Path


def render(launch: LaunchPlan, gpus: Sequence[str]) -> tuple[AgentProcess, ...]:
    """One agent for each host, the leader first. `gpus` are the devices that may be used."""
    return tuple(_agent(launch, node, host, gpus) for node, host in enumerate(launch.hosts))


def _agent(launch: LaunchPlan, node: int, host: str, gpus: Sequence[str]) -> AgentProcess:
    run_dir = RunDir(Path(launch.run_dir))
    argv = (
        *command(sys.executable, "orchestrator.agent"),
        f"--run-dir={launch.run_dir}",
        f"--host={host}",
        "--address=127.0.0.1",
        "--bind=127.0.0.1",
        f"--launch={launch.launch}",
        f"--devices={launch.devices_per_host}",
        f"--agent-timeout={launch.agent_timeout}",
        *(("--lead",) if host == launch.leader else ()),
    )
    devices = launch.devices_per_host
    mine = gpus[node * devices : (node + 1) * devices]
    visible = ",".join(mine) if len(launch.hosts) * devices <= len(gpus) else ""
    # Loopback: a laptop's host name often resolves to nothing, or to an address that moves.
    # And no other machine has to do with the job: gloo and NCCL listen there alone.
    environ = {
        "CUDA_VISIBLE_DEVICES": visible,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return AgentProcess(host=host, argv=argv, environ=environ, log=run_dir.agent_log(host))


class LocalBackend:
    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        self.environ = environ
        self.clock = clock
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def describe(self, handover: Handover) -> str:
        lines = []
        for agent in render(handover.launch, visible_gpus(self.environ)):
            setting = " ".join(
                f"{key}={shlex.quote(value)}" for key, value in agent.environ.items()
            )
            lines.append(
                f"# {agent.host}, output to {agent.log}\n{setting} {shlex.join(agent.argv)}"
            )
        return "\n".join(lines)

    def check(self, handover: Handover) -> str:
        return ""

    def submit(self, handover: Handover) -> None:
        launch = handover.launch
        self.clear(launch)
        try:
            for agent in render(launch, visible_gpus(self.environ)):
                self._start(agent)
        except BackendError:
            # Those that did start would wait for the others in vain.
            for process in self.started.values():
                process.kill()
                process.wait()
            raise

    def standing(self, launch: LaunchPlan) -> str | None:
        """Its agents' locks say it, which `submit` looks at: there is no queue."""
        return None

    def glance(self, launches: Sequence[LaunchPlan]) -> Sequence[Sighting]:
        return [Sighting("this machine has no queue", held=False) for _ in launches]

    def name_of(self, launch: LaunchPlan) -> str | None:
        return None

    def cluster(self) -> str:
        return LOCAL

    def known(self, hosts: Sequence[str]) -> tuple[str, ...]:
        return tuple(hosts)

    def rival(self, launch: LaunchPlan) -> str | None:
        return None

    def allocation(self, launch: LaunchPlan) -> Allocation | None:
        return None

    def notices(self, launch: LaunchPlan, hosts: Sequence[str]) -> tuple[HostNotice, ...]:
        return ()

    def why_ending(self, launch: LaunchPlan) -> Cause:
        return "cancelled"

    def taken(self, launch: LaunchPlan, hosts: Mapping[str, float]) -> Mapping[str, str]:
        return {}

    def requeue(
        self,
        launch: LaunchPlan,
        exclude: Sequence[str],
        *,
        again: Sequence[str] = (),
        whole: bool = True,
    ) -> None:
        raise BackendError("this machine has no queue to go back to", fix="submit it with --resume")

    def revive_leader(self, launch: LaunchPlan, *, silent_s: float | None) -> None:
        raise BackendError("on this machine nobody waits for another leader")

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
        if former is not None:  # it may wait for the lock without holding it
            former.kill()
            former.wait()
        _end_holder(RunDir(Path(launch.run_dir)).agent_lock(host), self.clock, leave_s=0.0)
        agent = next(
            (a for a in render(launch, visible_gpus(self.environ)) if a.host == host), None
        )
        if agent is None:
            raise BackendError(f"{host} is no host of this launch", fix="a defect: report it")
        self._start(agent)

    def clear(self, launch: LaunchPlan) -> None:
        run_dir = RunDir(Path(launch.run_dir))
        for lock in sorted(run_dir.logs.glob("agent-*.lock")):
            _end_holder(lock, self.clock, leave_s=LEAVE_S)
        for lock in sorted(run_dir.logs.glob("ranks-*.lock")):
            _await_free(lock, self.clock)

    def _start(self, agent: AgentProcess) -> None:
        try:
            agent.log.parent.mkdir(parents=True, exist_ok=True)
            with agent.log.open("ab") as out:
                process = subprocess.Popen(
                    agent.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**self.environ, **agent.environ},
                    start_new_session=True,
                )
        except OSError as exc:
            raise BackendError(f"the agent of {agent.host} could not be started: {exc}") from exc
        self.started[agent.host] = process


def _end_holder(lock: Path, clock: Clock, leave_s: float) -> None:
    """End the agent that holds `lock`: SIGTERM, and SIGKILL after `leave_s`."""
    begun = clock.monotonic()
    told: int | None = None
    while is_held_alone(lock):
        pid = _pid_in(lock)
        overdue = clock.monotonic() - begun >= leave_s
        if pid is not None and (overdue or pid != told):
            _signal(pid, signal.SIGKILL if overdue else signal.SIGTERM)
            told = pid
        if clock.monotonic() - begun > leave_s + LEAVE_S:
            raise BackendError(
                f"process {pid}, an agent of this job, does not end",
                fix=f"look at it with `ps -o pid,stat,wchan,cmd -p {pid}`",
            )
        clock.sleep(POLL_S)


def _pid_in(lock: Path) -> int | None:
    try:
        return int(lock.read_text())
    except (OSError, ValueError):
        return None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _await_free(lock: Path, clock: Clock) -> None:
    """Wait for the ranks of an agent that is gone, which the kernel ends with it."""
    deadline = clock.monotonic() + LEAVE_S
    while not is_free(lock):
        if clock.monotonic() > deadline:
            raise BackendError(
                f"processes of this job's ranks still run; they hold {lock}",
                fix=f"look at them with `fuser -v {lock}`, end them with `fuser -k {lock}`",
            )
        clock.sleep(POLL_S)
