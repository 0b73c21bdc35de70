"""Collects the evidence that one host has of a hang or of an ended rank, within one time limit.

It also writes the evidence into the traces. Missing evidence is recorded with the reason.
"""

import asyncio
import json
import logging
import re
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.agent.attempt import TAIL_S, Attempt
from orchestrator.agent.evidence.flight_recorder import Asking, Dumps, gather_dumps, last_dumps
from orchestrator.agent.evidence.rank_evidence import how_ended, last_lines, last_words_of
from orchestrator.agent.processes.cgroups import told
from orchestrator.contract.check_results import Finding
from orchestrator.contract.codec import encode
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.messages.agent_protocol import Evidence
from orchestrator.contract.messages.events import EvidenceGathered, RankEvidence, RankExited
from orchestrator.contract.spec.failures import FailureRule, Reading
from orchestrator.diagnosis.logs.patterns import MOST_LINES
from orchestrator.diagnosis.logs.readings import (
    End,
    kept_lines,
    read_exit,
    read_kernel,
    without_excess,
)
from orchestrator.health.host_probes import KERNEL_LINES, HostProbe, Probe, probed, telling
from orchestrator.posix.run_with_timeout import within

log = logging.getLogger(__name__)

KEEP_S = 2.0
"""Limit to write the evidence into the traces. The end of an attempt waits for it."""
NEAR_S = 300.0
"""Kernel messages older than this before the last progress of the ranks are ignored, because the
ranks survived them. It covers the drift of the kernel's clock, which no time server corrects, and
the delay between a fault and its effect."""
OOM_KILL = re.compile(r"oom[-_]kill|out of memory: kill", re.IGNORECASE)
"""Lines of the kernel's log on a process that its OOM killer has killed."""


class Found(Struct, frozen=True, kw_only=True):
    """The evidence for the leader, and what only the traces get."""

    evidence: Evidence
    ended: Mapping[int, str]
    probe: HostProbe


async def gather(attempt: Attempt, timeout_s: float, probe: Probe, *, hang: bool) -> Found:
    """Gather stacks, dumps and probes at the same time. Answers that come after `timeout_s` are
    ignored; reading the others takes a little longer."""
    start, place, asking = attempt.start, attempt.place, _asking(attempt)
    pids, ended = attempt.running(), attempt.ended()
    stackless: dict[int, str] = {}
    ranks, dumps, found = await asyncio.gather(
        attempt.gather(timeout_s, stackless, hang=hang),
        gather_dumps(pids, ended, asking, timeout_s),
        probed(probe, pids, timeout_s),
    )
    kernel, readings = await _kernel(attempt, found)
    event = EvidenceGathered(
        attempt=start.attempt,
        host=place.host,
        ranks=ranks,
        dumps=len(dumps.reduced),
        withheld=dumps.withheld,
        unread=tuple(one.rank for one in ranks if not one.stack and one.rank in stackless),
        missing=_missing(ranks, stackless, dumps, found),
        ended={str(rank): how for rank, how in ended.items()},
        findings=_problems(found),
        kernel=kernel,
        readings=readings,
    )
    return Found(evidence=_with_dumps(event, dumps), ended=ended, probe=found)


def _with_dumps(event: EvidenceGathered, dumps: Dumps) -> Evidence:
    return Evidence(event=event, dumps={str(rank): text for rank, text in dumps.reduced.items()})


async def _kernel(
    attempt: Attempt, found: HostProbe
) -> tuple[tuple[str, ...], tuple[Reading, ...]]:
    """Lines of the kernel's log that may be the cause, and their failure classes. OOM kills are
    added from the cgroup's counter, because the log may be unreadable."""
    # A message from before the attempt cannot explain its end.
    since = max(attempt.begun, attempt.last_common_progress() - NEAR_S)
    before, kills = attempt.kills.between(since, attempt.clock.monotonic())
    kernel = found.kernel
    if before is not None and kills == before:
        # All groups of a machine share its log: another job or pod was killed for its memory.
        kernel = tuple(line for line in kernel if not OOM_KILL.search(line))
    logged = await within(None, telling, kernel, since, attempt.start.classes)
    lines = (*logged, *told(before, kills))
    return lines, await within(None, read_kernel, lines, attempt.start.classes)


def _asking(attempt: Attempt) -> Asking:
    start, place = attempt.start, attempt.place
    return Asking(
        traces=place.run_dir.traces(start.attempt),
        socket=place.socket,
        attempt=start.attempt,
        world=start.nodes * start.ranks_per_host,
    )


async def gather_last(attempt: Attempt, timeout_s: float) -> Evidence:
    """The last collectives that the ranks of an ended attempt called, from the dumps that they
    wrote before they exited."""
    # A rank without a reported end may have written a dump as well.
    ended = dict.fromkeys(attempt.running(), how_ended(None, None)) | attempt.ended()
    dumps = await last_dumps(ended, _asking(attempt), timeout_s)
    event = EvidenceGathered(
        attempt=attempt.start.attempt,
        host=attempt.place.host,
        ranks=(),
        dumps=len(dumps.reduced),
        missing={f"dump of rank {rank}": why for rank, why in dumps.missing.items()},
    )
    return _with_dumps(event, dumps)


async def look_back(attempt: Attempt, timeout_s: float, probe: Probe) -> Found:
    """Check a host on which a rank has ended. The rank itself has no stack any more."""
    found = await probed(probe, attempt.running(), timeout_s)
    kernel, readings = await _kernel(attempt, found)
    event = EvidenceGathered(
        attempt=attempt.start.attempt,
        host=attempt.place.host,
        ranks=(),
        missing=dict(words.split(": ", 1) for words in found.missing),
        findings=_problems(found),
        kernel=kernel,
        readings=readings,
        unasked=True,
    )
    return Found(evidence=Evidence(event=event), ended=attempt.ended(), probe=found)


async def keep(attempt: Attempt, found: Found, limit_s: float = KEEP_S) -> None:
    """Write the evidence into the traces. Call it after the leader has the evidence: the traces are
    on storage, which may be what broke."""
    host = found.evidence.event.host
    try:
        await within(limit_s, _write, attempt, found)
    except TimeoutError:
        log.warning("failed to write the evidence of %s: storage timed out", host)
    except OSError as exc:
        log.warning("failed to write the evidence of %s: %s", host, exc)


async def read_stopped(attempt: Attempt, exited: RankExited) -> RankExited:
    """Classify the exit of a stopped rank by its exception alone. Its log is not read, because the
    logs of all ranks of a large job would be too much for the journal."""
    return await within(None, as_read, exited, (), attempt.start.classes)


async def with_last_lines(
    attempt: Attempt, exited: RankExited, limit_s: float = TAIL_S
) -> RankExited:
    """`exited` with the last lines of the rank's log and their failure class.

    The log is read in a thread with a limit: failed storage may be the reason why the rank ended,
    and the agent must keep sending meanwhile.
    """
    begun = attempt.clock.monotonic()
    path = attempt.log_dir / f"rank-{exited.rank}.log"
    try:
        tail = await within(limit_s, last_lines, path, MOST_LINES)
    except TimeoutError:
        log.warning("reading the log of rank %s timed out: reporting without it", exited.rank)
        tail = (f"reading {path} timed out after {limit_s:.1f} s",)
    age_s = exited.detected_after_s + attempt.clock.monotonic() - begun
    # The text is classified here and not by the leader, and in a thread, so that long text blocks
    # neither event loop.
    exited = replace(exited, detected_after_s=age_s)
    return await within(None, as_read, exited, tail, attempt.start.classes)


def as_read(exited: RankExited, lines: tuple[str, ...], own: tuple[FailureRule, ...]) -> RankExited:
    """`exited` with its failure class, and with the few of `lines` that are kept.

    Args:
        lines: the end of the rank's log.
        own: the failure classes of the job spec.
    """
    end = End(
        exit_code=exited.exit_code,
        signal=exited.signal,
        error=exited.error,
        lines=lines,
        phase=exited.phase,
        ended_first=exited.ended_first,
    )
    reading = read_exit(end, own)
    kept = kept_lines(lines, reading)
    return replace(exited, error=without_excess(exited.error), log_tail=kept, reading=reading)


def _problems(found: HostProbe) -> tuple[Finding, ...]:
    return tuple(finding for finding in found.findings if finding.verdict in ("stops", "warns"))


def _missing(
    ranks: tuple[RankEvidence, ...], stackless: Mapping[int, str], dumps: Dumps, found: HostProbe
) -> dict[str, str]:
    lost = {f"dump of rank {rank}": why for rank, why in dumps.missing.items()}
    for one in ranks:
        if not one.stack:
            why = stackless.get(one.rank, "no answer")
            lost[f"stack of rank {one.rank}"] = (
                f"{why}; its process was in state {one.process_state}"
            )
    return lost | dict(words.split(": ", 1) for words in found.missing)


def _write(attempt: Attempt, found: Found) -> None:
    """Write `host-<host>.jsonl`. Stacks and dumps have their own files."""
    evidence = found.evidence.event
    tails = {
        str(rank): last_words_of(attempt.log_dir / f"rank-{rank}.log")
        for rank in sorted({*found.ended, *(one.rank for one in evidence.ranks)})
    }
    probe = replace(found.probe, kernel=found.probe.kernel[-KERNEL_LINES:])
    body = {
        "host": evidence.host,
        "attempt": evidence.attempt,
        "at": attempt.clock.now(),
        "ranks": [{**encode(one), "stack": None} for one in evidence.ranks],
        "ended": {str(rank): how for rank, how in found.ended.items()},
        "log_tails": tails,
        "probes": encode(probe),
        "missing": dict(evidence.missing),
    }
    path = attempt.place.run_dir.traces(evidence.attempt) / f"host-{evidence.host}.jsonl"
    write_whole(path, json.dumps(body).encode() + b"\n")
