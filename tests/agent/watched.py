"""Ranks of the real trainer with agents and a leader around them, as far as these hear and decide.

Heartbeats, exits, last lines and dumps come to each host's `Attempt`, digests and reports go to the
leader's `Monitor`, `step` and judge, all of them the real ones. What is missing is what launches
ranks, and the network between the hosts.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from orchestrator.agent.attempt import Attempt
from orchestrator.agent.evidence.evidence_collector import gather_last, with_last_lines
from orchestrator.agent.processes.torchrun import HostPlace
from orchestrator.agent.rank_socket import listen
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.messages.actions import Action, GatherEvidence, JudgeHang, StopAttempt
from orchestrator.contract.messages.agent_protocol import PULSE_S, Digest, Evidence, Start
from orchestrator.contract.messages.events import (
    Event,
    HostStopped,
    JobSubmitted,
    RankExited,
    stamped,
)
from orchestrator.contract.messages.rank_messages import Datagram, RankStarted
from orchestrator.job.state import Run
from orchestrator.leader.hang_analysis import judged_of
from orchestrator.leader.monitor import Monitor
from orchestrator.system import SystemClock
from tests.agent.injected import OWN_FAULTS, PER_HOST, WAIT_S, forked, pids_of
from tests.job.supervise_stage import Job, plan
from tests.trainer.checkpoint.checkpoint_launch import led
from tests.trainer.launch.tiny_runs import environments, tiny

LOOK_S = 0.25
HOSTS = ("host-0", "host-1")


def watched(
    folder: Path,
    mesh: Mesh,
    drill: Mapping[str, Any] | None,
    own: Mapping[int, Mapping[str, float]] | None = None,
    **changes: Any,
) -> "Leader":
    """The leader of a job of two hosts when all ranks have ended. One rank has the fault `drill`,
    or the fault that `own` has for it."""
    run_dir, path = RunDir(folder / "run"), folder / "trainer.json"
    axes = dict(zip(AXES, mesh.degrees, strict=True)) | changes.pop("parallel", {})
    path.write_text(json.dumps(led(tiny(run_dir.path, parallel=axes, **changes))))
    hosts = [_host(name, run_dir, folder) for name in HOSTS]
    run_dir.traces(1).mkdir(parents=True)
    env = {
        "NDCTL_ATTEMPT": "1",
        "NDCTL_TRACE_DIR": str(run_dir.traces(1)),
        "NDCTL_DRILLS": json.dumps([{"id": 1, "target": "rank", **drill}] if drill else []),
    }
    envs = environments(mesh.world_size, env)
    logs = []
    for rank, one in enumerate(envs):
        host = hosts[rank // PER_HOST]
        one["NDCTL_HEARTBEAT_SOCKET"] = str(host.place.socket)
        one[OWN_FAULTS] = json.dumps((own or {}).get(rank, {}))
        logs.append(host.log_dir / f"rank-{rank}.log")
    leader = Leader(mesh, hosts)
    with forked(envs, path, logs) as ranks:
        asyncio.run(leader.lead(ranks))
    return leader


def _host(name: str, run_dir: RunDir, folder: Path) -> Attempt:
    place = HostPlace(
        python="",
        run_dir=run_dir,
        host=name,
        address="127.0.0.1",
        socket=folder / f"{name}.sock",
        parent=os.getpid(),
    )
    start = Start(
        attempt=1,
        node_rank=HOSTS.index(name),
        nodes=len(HOSTS),
        ranks_per_host=PER_HOST,
        master_address="127.0.0.1",
        master_port=1,
        config="",
        drills=(),
    )
    attempt = Attempt(start, place, SystemClock())
    attempt.log_dir.mkdir(parents=True)
    return attempt


def ear_of(host: Attempt) -> Callable[[Datagram], None]:
    def hear(datagram: Datagram) -> None:
        host.hear(datagram)  # of an end nobody tells there

    return hear


class Leader:
    def __init__(self, mesh: Mesh, hosts: list[Attempt]) -> None:
        self.hosts = hosts
        self.job = Job(plan=replace(plan(), mesh=mesh), max_restarts=0).starts()
        submitted = self.job.run.job
        assert isinstance(submitted, JobSubmitted)
        self.monitor = Monitor(submitted)
        self.events: list[Event] = []
        self.heard: list[Evidence] = []
        self.stop_by: float | None = None

    @property
    def run(self) -> Run:
        return self.job.run

    def all_of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def lead(self, ranks: list[BaseProcess]) -> None:
        """Until no rank is left, and what that amounts to is decided."""
        now = time.monotonic()
        self.monitor.begin(1, self.run, now)
        transports = [await listen(host.place.socket, ear_of(host)) for host in self.hosts]
        for number, pid in pids_of(ranks).items():
            self._host(number).hear(
                RankStarted(attempt=1, rank=number, local_rank=number % PER_HOST, pid=pid)
            )
        left, until, told = dict(enumerate(ranks)), now + WAIT_S, now
        while left:
            assert time.monotonic() < until, "ranks still worked"
            await asyncio.sleep(0.05)
            await self._bury(left)
            now = time.monotonic()
            if now - told > PULSE_S:
                told = now
                self._digest(now)
            await self._decide([*self.monitor.look(lambda: True, now)])
            if self.stop_by is not None and now > self.stop_by:
                for rank in left.values():
                    rank.kill()
        for transport in transports:
            transport.close()
        await self._conclude()

    def _host(self, rank: int) -> Attempt:
        return self.hosts[rank // PER_HOST]

    def _digest(self, now: float) -> None:
        for host in self.hosts:
            digest = Digest(attempt=1, ranks=host.digest())
            for event in self.monitor.hear(digest, now):
                self._happened(event)

    async def _bury(self, left: dict[int, BaseProcess]) -> None:
        """As keepers tell of the ends of ranks, and agents of those that failed."""
        for number, rank in [*left.items()]:
            if (code := rank.exitcode) is None:
                continue
            del left[number]
            host = self._host(number)
            killed = -code if code < 0 else None
            ended = RankExited(
                attempt=1, rank=number, exit_code=None if killed else code, signal=killed
            )
            await asyncio.sleep(0)  # what it said before comes first
            exited = host.hear(ended)
            if exited is not None:
                await self._report(await with_last_lines(host, exited))

    async def _report(self, event: Event) -> None:
        await self._decide([stamped(event, time.time())])

    async def _decide(self, events: list[Event]) -> None:
        for event in events:
            for action in self._happened(event):
                await self._perform(action)

    def _happened(self, event: Event) -> tuple[Action, ...]:
        self.events.append(event)
        return self.job.tell(event)

    async def _perform(self, action: Action) -> None:
        match action:
            case StopAttempt():
                self.monitor.end()
                self.stop_by = time.monotonic() + action.grace_s
                for host in self.hosts:
                    await host.stop(0.0)
            case GatherEvidence(ended=True):
                self.heard = [await gather_last(host, WAIT_S) for host in self.hosts]
                for evidence in self.heard:
                    await self._report(evidence.event)
            case JudgeHang():
                judged = judged_of(self.run, 1, self.heard)
                await self._decide([replace(judged, at=time.time())])
            case _:
                pass

    async def _conclude(self) -> None:
        """As agents tell that no process is left."""
        for host in self.hosts:
            codes = [record.ended.exit_code for record in host.ranks.values() if record.ended]
            finished = codes == [0] * PER_HOST
            await self._report(HostStopped(attempt=1, host=host.place.host, finished=finished))
