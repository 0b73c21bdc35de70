"""All evidence that one host has of a hang, or of a rank that ended: within one limit, kept in the
traces, and what did not come recorded with why.
"""

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path

from orchestrator.agent.attempt import Attempt
from orchestrator.agent.evidence import last_lines
from orchestrator.agent.flights import Asking, Dumps, gather_dumps, last_dumps
from orchestrator.agent.probes import HostProbe, Probe, probed, telling
from orchestrator.contract.codec import encode
from orchestrator.contract.events import RankEvidence
from orchestrator.contract.findings import Finding
from orchestrator.contract.protocol import Evidence, Exited

log = logging.getLogger(__name__)

TAIL_S = 2.0
"""For the last lines of a rank's log: that it ended is told without them as well."""


async def gather(attempt: Attempt, timeout_s: float, probe: Probe) -> Evidence:
    """Stacks, dumps and probes side by side; nothing is waited for beyond `timeout_s`."""
    start, place, asking = attempt.start, attempt.place, _asking(attempt)
    pids, ended = attempt.running(), attempt.ended()
    ranks, dumps, found = await asyncio.gather(
        attempt.gather(timeout_s),
        gather_dumps(pids, ended, asking, timeout_s),
        probed(probe, pids, timeout_s),
    )
    evidence = Evidence(
        attempt=start.attempt,
        host=place.host,
        ranks=ranks,
        dumps={str(rank): text for rank, text in dumps.reduced.items()},
        withheld=dumps.withheld,
        missing=_missing(ranks, dumps, found),
        findings=_troubles(found),
        kernel=telling(found.kernel, attempt.begun, attempt.start.classes),
    )
    await asyncio.to_thread(_keep, attempt, evidence, ended, found)
    return evidence


def _asking(attempt: Attempt) -> Asking:
    start, place = attempt.start, attempt.place
    return Asking(
        traces=place.run_dir.traces(start.attempt),
        socket=place.socket,
        attempt=start.attempt,
        world=start.nodes * start.ranks_per_host,
    )


async def gather_last(attempt: Attempt) -> Evidence:
    """What the ranks of an attempt that is over had called last, of those that could still say."""
    ended = dict.fromkeys(attempt.running(), "nobody saw how") | attempt.ended()
    dumps = await last_dumps(ended, _asking(attempt))
    return Evidence(
        attempt=attempt.start.attempt,
        host=attempt.place.host,
        ranks=(),
        dumps={str(rank): text for rank, text in dumps.reduced.items()},
        missing={f"dump of rank {rank}": why for rank, why in dumps.missing.items()},
    )


async def look_back(attempt: Attempt, timeout_s: float, probe: Probe) -> Evidence:
    """What a host says of itself on which a rank has ended; the rank can say nothing any more."""
    found = await probed(probe, attempt.running(), timeout_s)
    evidence = Evidence(
        attempt=attempt.start.attempt,
        host=attempt.place.host,
        ranks=(),
        missing=dict(words.split(": ", 1) for words in found.missing),
        findings=_troubles(found),
        kernel=telling(found.kernel, attempt.begun, attempt.start.classes),
        unasked=True,
    )
    await asyncio.to_thread(_keep, attempt, evidence, attempt.ended(), found)
    return evidence


async def with_last_lines(attempt: Attempt, exited: Exited, limit_s: float = TAIL_S) -> Exited:
    """What the rank wrote last. In a thread: storage that does not answer may be why it ended, and
    the agent is to be heard meanwhile."""
    begun = attempt.clock.monotonic()
    path = attempt.log_dir / f"rank-{exited.ended.rank}.log"
    try:
        tail = await asyncio.wait_for(asyncio.to_thread(last_lines, path), limit_s)
    except TimeoutError:
        log.warning("the log of rank %s does not answer: told without it", exited.ended.rank)
        tail = (f"{path} did not answer within {limit_s:.1f} s",)
    age_s = exited.age_s + attempt.clock.monotonic() - begun
    return replace(exited, age_s=age_s, log_tail=tail)


def _troubles(found: HostProbe) -> tuple[Finding, ...]:
    return tuple(finding for finding in found.findings if finding.verdict in ("stops", "warns"))


def _missing(ranks: tuple[RankEvidence, ...], dumps: Dumps, found: HostProbe) -> dict[str, str]:
    lost = {f"dump of rank {rank}": why for rank, why in dumps.missing.items()}
    for one in ranks:
        if not one.stack:
            state = f"its process was in state {one.process_state}"
            lost[f"stack of rank {one.rank}"] = f"no answer; {state}"
    return lost | dict(words.split(": ", 1) for words in found.missing)


def _keep(attempt: Attempt, evidence: Evidence, ended: dict[int, str], found: HostProbe) -> None:
    """`host-<host>.jsonl`: all but stacks and dumps, which have files of their own."""
    tails = {
        str(rank): last_lines(attempt.log_dir / f"rank-{rank}.log")
        for rank in sorted({*ended, *(one.rank for one in evidence.ranks)})
    }
    body = {
        "host": evidence.host,
        "attempt": evidence.attempt,
        "at": attempt.clock.now(),
        "ranks": [{**encode(one), "stack": None} for one in evidence.ranks],
        "ended": {str(rank): how for rank, how in ended.items()},
        "log_tails": tails,
        "probes": encode(found),
        "missing": dict(evidence.missing),
    }
    path = attempt.place.run_dir.traces(evidence.attempt) / f"host-{evidence.host}.jsonl"
    try:
        write_whole(path, json.dumps(body) + "\n")
    except OSError as exc:
        log.warning("the evidence of %s could not be kept: %s", evidence.host, exc)


def write_whole(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)
