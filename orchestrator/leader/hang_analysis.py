"""Collects the evidence of a hang from all hosts, and analyses it in a thread.

The analysis also uses what the scheduler reports about the hosts.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from orchestrator.contract.messages.actions import GatherEvidence
from orchestrator.contract.messages.agent_protocol import Evidence, Gather
from orchestrator.contract.messages.events import Event, HangJudged, JobSubmitted
from orchestrator.diagnosis.cause.hang_event import facts_of, judged_as, judgement
from orchestrator.diagnosis.cause.mismatch import mismatched
from orchestrator.diagnosis.dumps.dump import RankDump, Unreadable
from orchestrator.diagnosis.dumps.dump_summary import from_text
from orchestrator.diagnosis.dumps.group_names import axes_of
from orchestrator.diagnosis.dumps.reader import share
from orchestrator.diagnosis.hang.post_mortem import differing
from orchestrator.diagnosis.hang.verdicts import HangEvidence, RankFacts
from orchestrator.errors import BackendError
from orchestrator.job.state import Run
from orchestrator.leader.storage import LeaderStorage
from orchestrator.seams import AllocationBackend, Clock, Worker

log = logging.getLogger(__name__)

SCHEDULER_S = 5.0
"""Limit for the scheduler's report on the hosts."""
MOST_FLAGGED = 8
"""Most hosts of that report that the journal gets."""


class HangAnalysis:
    def __init__(
        self,
        job: JobSubmitted,
        run: Callable[[], Run],
        storage: LeaderStorage,
        backend: AllocationBackend,
        clock: Clock,
        worker: Worker = asyncio.to_thread,
    ) -> None:
        self.job = job
        self.run = run
        self.backend = backend
        self.clock = clock
        self.storage = storage
        self.worker = worker
        self.attempt = 0
        self.heard: dict[str, Evidence] = {}
        """Host -> its evidence of `attempt`."""

    def hear(self, evidence: Evidence) -> None:
        event = evidence.event
        if event.attempt != self.attempt:
            self.attempt, self.heard = event.attempt, {}
        self.heard[event.host] = evidence

    def forget(self) -> None:
        """Drop all evidence, because new evidence is requested. An earlier hang may have been a
        false alarm."""
        self.heard = {}

    async def judge(
        self, attempt: int, happened: Callable[[Event], None], now: Callable[[], float]
    ) -> None:
        # If no agent has answered in time, `heard` still has the evidence of an earlier attempt.
        parts = list(self.heard.values()) if self.attempt == attempt else []
        hosts = self.run().attempt.placement
        # The scheduler is asked while the thread works, so that its answer does not delay the
        # restart.
        said = asyncio.create_task(self._scheduler(attempt, hosts))
        judged = await self.worker(self._analyse, attempt, parts)
        happened(replace(judged, at=now(), signs=(*judged.signs, *await said)))
        self.heard = {}

    def _analyse(self, attempt: int, parts: Sequence[Evidence]) -> HangJudged:
        begun = self.clock.monotonic()
        judged = judged_of(self.run(), attempt, parts)
        return replace(judged, took_s=round(self.clock.monotonic() - begun, 3))

    async def _scheduler(self, attempt: int, hosts: Sequence[str]) -> tuple[str, ...]:
        """What the scheduler reports about the hosts, also written to the traces; empty without a
        scheduler."""
        granted = self.backend.granted
        if self.run().scheduler.allocation is None or granted is None:
            return ()
        asking = self.worker(granted.notices, self.job.launch, hosts)
        try:
            found = await asyncio.wait_for(asking, SCHEDULER_S)
            said = {notice.host: f"{notice.state}: {notice.reason}" for notice in found}
            words = tuple(f"the scheduler says {h} is {w}" for h, w in said.items())[:MOST_FLAGGED]
        # The ranks stand still until the verdict, so it does not wait longer. It says what is
        # missing.
        except (BackendError, TimeoutError) as exc:
            why = str(exc) or f"no answer within {SCHEDULER_S:.0f} s"
            said, words = {}, (f"missing: the scheduler's report: {why}",)
        body = {"at": self.clock.now(), "hosts": said, "missing": [] if said else list(words)}
        try:
            data = json.dumps(body, indent=1).encode()
            await self.worker(self.storage.write_trace, attempt, "scheduler.json", data)
        # The trace is for people only. The verdict has these words already.
        except OSError as exc:
            log.warning("failed to write the scheduler's report: %s", exc)
        return words


def gather_order(action: GatherEvidence) -> Gather:
    return Gather(attempt=action.attempt, timeout_s=action.timeout_s, ended=action.ended)


def judged_of(run: Run, attempt: int, parts: Sequence[Evidence]) -> HangJudged:
    """The verdict that follows from the evidence of the hosts. Pure."""
    hosts, plan = run.attempt.placement, run.plan
    scene, lost = scene_of(parts)
    facts = {
        rank: replace(
            scene.facts.get(rank, RankFacts(rank=rank)), host=hosts[rank // plan.ranks_per_host]
        )
        for rank in range(plan.world_size)
    }
    scene = replace(scene, facts=facts, world=plan.world_size, axes=axes_of(plan.mesh))
    # A silent agent could not report itself what is missing, so that is added here.
    silent = [host for host in hosts if host not in {part.event.host for part in parts}]
    lost = [*(f"all of {host}: its agent sent nothing in time" for host in silent), *lost]
    # The ranks have ended already, because the sizes of a collective differed. So the question is
    # not why they wait, but which rank differs.
    if run.interruption.findings is not None and run.interruption.findings.asked_after:
        found = differing(scene, mismatched(run.interruption.findings))
        return judged_as(found, scene, at=0.0, attempt=attempt, missing=lost)
    return judgement(scene, at=0.0, attempt=attempt, missing=lost)


def scene_of(parts: Sequence[Evidence]) -> tuple[HangEvidence, list[str]]:
    """The evidence of all agents as one scene, and a list of what is missing."""
    facts: dict[int, RankFacts] = {}
    dumps: dict[int, RankDump] = {}
    lost: list[str] = []
    held: dict[Any, Any] = {}

    # Dumps of thousands of ranks have many equal values. Keeping one copy of each saves memory.
    def same(value: Any) -> Any:
        return held.setdefault(value, value)

    for part in parts:
        event = part.event
        facts |= facts_of(event)
        lost += [f"{what} ({event.host}): {why}" for what, why in event.missing.items()]
        read = []
        for rank, text in part.dumps.items():
            try:
                read.append(from_text(text))
            # One damaged dump must not cost the verdict on all other ranks.
            except Unreadable as exc:
                lost.append(f"dump of rank {rank} ({event.host}): {exc}")
        for dump in read:
            share(dump, same)
        dumps |= {dump.rank: dump for dump in read}
    # The verdict shows only the first ones. It depends most on the dumps.
    lost.sort(key=lambda words: not words.startswith("dump"))
    return HangEvidence(dumps=dumps, facts=facts), lost
