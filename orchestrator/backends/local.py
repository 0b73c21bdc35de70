"""The local backend: each host is an agent process on this machine, in its own session."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread

from msgspec import Struct

from orchestrator.backends.host_processes import LEAVE_S, await_free, end_holder
from orchestrator.contract.check_results import Finding
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError
from orchestrator.host_strikes import LOCAL
from orchestrator.inventory.local import visible_gpus
from orchestrator.run_module import command
from orchestrator.seams import Clock, LaunchStatus


class AgentProcess(Struct, frozen=True, kw_only=True):
    """The command of one agent."""

    host: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    """Added to the environment of the submitting process."""
    log: Path


def render(launch: LaunchPlan, gpus: Sequence[str]) -> tuple[AgentProcess, ...]:
    """One agent per host, the leader first. `gpus`: devices that the job may use."""
    return tuple(_agent(launch, node, host, gpus) for node, host in enumerate(launch.hosts))


def _agent(launch: LaunchPlan, node: int, host: str, gpus: Sequence[str]) -> AgentProcess:
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
        *(("--lead",) if host == launch.leader else ()),
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
    }
    return AgentProcess(host=host, argv=argv, environ=environ, log=run_dir.agent_log(host))


QUEUE = "queue"
"""In the place of a host's name, for the process that waits for other jobs."""


def render_queue(launch: LaunchPlan) -> AgentProcess:
    """The process that starts the agents when the jobs of `launch.after` have succeeded."""
    argv = (
        *command(sys.executable, "orchestrator.backends.entry.local_queue"),
        f"--run-dir={launch.run_dir}",
        f"--launch={launch.launch}",
    )
    log = RunDir(Path(launch.run_dir)).agent_log(QUEUE)
    return AgentProcess(host=QUEUE, argv=argv, environ={}, log=log)


class LocalBackend:
    """No scheduler grants these hosts, so only `replace` has something to do."""

    granted = None
    fixed_hosts = None
    successors = None
    unattended = None

    def __init__(self, environ: Mapping[str, str], clock: Clock) -> None:
        self.environ = environ
        self.clock = clock
        self.started: dict[str, subprocess.Popen[bytes]] = {}

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
        return [LaunchStatus("this machine has no queue", held=False) for _ in launches]

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
        agent = next(
            (a for a in render(launch, visible_gpus(self.environ)) if a.host == host), None
        )
        if agent is None:
            raise BackendError(f"{host} is not a host of this launch", fix="report this bug")
        self._start(agent)

    def clear(self, launch: LaunchPlan) -> None:
        run_dir = RunDir(Path(launch.run_dir))
        for lock in sorted(run_dir.logs.glob("agent-*.lock")):
            end_holder(lock, self.clock, leave_s=LEAVE_S)
        for lock in sorted(run_dir.logs.glob("ranks-*.lock")):
            await_free(lock, self.clock)

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
            raise BackendError(f"failed to start the agent of {agent.host}: {exc}") from exc
        self.started[agent.host] = process


def _reap(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.wait()
