"""Ranks of the real trainer with the real decisions of their agents and their leader.

Heartbeats, exits, last log lines and dumps go to the `Attempt` of each host, and its digests and
reports go to `Monitor`, `step` and the hang analysis of the leader. Only the launch of ranks and
the network between hosts are missing.
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
from tests.agent.forked_ranks import BATCH, OWN_FAULTS, PER_HOST, WAIT_S, forked, pids_of
from tests.job.job_driver import Job, plan
from tests.trainer.checkpoint.checkpoint_launch import with_fence
from tests.trainer.launch.tiny_runs import environments, tiny

CHECK_S = 0.25
HOSTS = ("host-0", "host-1")


def run_ranks(
    folder: Path,
    mesh: Mesh,
    drill: Mapping[str, Any] | None,
    own: Mapping[int, Mapping[str, float]] | None = None,
    **changes: Any,
) -> "Leader":
    """Run a job on two hosts until all ranks have ended; returns its leader. One rank has the fault
    `drill`, or the faults in `own`."""
    run_dir, path = RunDir(folder / "run"), folder / "trainer.json"
    axes = dict(zip(AXES, mesh.degrees, strict=True)) | changes.pop("parallel", {})
    config = tiny(run_dir.path, parallel=axes, **{"global_batch_size": BATCH, **changes})
    path.write_text(json.dumps(with_fence(config)))
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


def receiver_of(host: Attempt) -> Callable[[Datagram], None]:
    def hear(datagram: Datagram) -> None:
        host.hear(datagram)  # exits are reported by `_report_exits`

    return hear


class Leader:
    def __init__(self, mesh: Mesh, hosts: list[Attempt]) -> None:
        self.hosts = hosts
        self.job = Job(plan=replace(plan(), mesh=mesh), max_restarts=0).starts()
        submitted = self.job.run.job
        assert isinstance(submitted, JobSubmitted)
        self.monitor = Monitor(submitted)
        self.events: list[Event] = []
        self.evidence: list[Evidence] = []
        self.stop_by: float | None = None

    @property
    def run(self) -> Run:
        return self.job.run

    def all_of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def lead(self, ranks: list[BaseProcess]) -> None:
        """Lead the job until no rank is left and the attempt has ended."""
        now = time.monotonic()
        self.monitor.begin(1, self.run, now)
        transports = [await listen(host.place.socket, receiver_of(host)) for host in self.hosts]
        for number, pid in pids_of(ranks).items():
            self._host(number).hear(
                RankStarted(attempt=1, rank=number, local_rank=number % PER_HOST, pid=pid)
            )
        left, until, sent_at = dict(enumerate(ranks)), now + WAIT_S, now
        while left:
            assert time.monotonic() < until, "ranks still worked"
            await asyncio.sleep(0.05)
            await self._report_exits(left)
            now = time.monotonic()
            if now - sent_at > PULSE_S:
                sent_at = now
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

    async def _report_exits(self, left: dict[int, BaseProcess]) -> None:
        """Report exits as rank watchers do, and failed ranks as agents do."""
        for number, rank in [*left.items()]:
            if (code := rank.exitcode) is None:
                continue
            del left[number]
            host = self._host(number)
            killed = -code if code < 0 else None
            ended = RankExited(
                attempt=1, rank=number, exit_code=None if killed else code, signal=killed
            )
            await asyncio.sleep(0)  # earlier messages of the rank come first
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
                self.evidence = [await gather_last(host, WAIT_S) for host in self.hosts]
                for evidence in self.evidence:
                    await self._report(evidence.event)
            case JudgeHang():
                judged = judged_of(self.run, 1, self.evidence)
                await self._decide([replace(judged, at=time.time())])
            case _:
                pass

    async def _conclude(self) -> None:
        """Report that no process is left, as agents do."""
        for host in self.hosts:
            codes = [record.ended.exit_code for record in host.ranks.values() if record.ended]
            finished = codes == [0] * PER_HOST
            await self._report(HostStopped(attempt=1, host=host.place.host, finished=finished))
