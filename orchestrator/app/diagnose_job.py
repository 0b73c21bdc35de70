"""`ndctl diagnose`: find the rank that blocks a job, from dumps and stacks."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from orchestrator.contract.files.run_dir import LAST_FILES, RunDir
from orchestrator.contract.messages.actions import StartAttempt
from orchestrator.contract.messages.events import (
    EvidenceGathered,
    HangDetected,
    HangJudged,
    HangOver,
    JobSubmitted,
    RankExited,
    Replanned,
)
from orchestrator.contract.plan import Plan
from orchestrator.dashboard import format
from orchestrator.dashboard.job_view.health import UNHEALTHY
from orchestrator.dashboard.next_steps import next_step
from orchestrator.dashboard.snapshot import Snapshot
from orchestrator.dashboard.status import action_taken, age_text, progress_steps
from orchestrator.diagnosis.cause.exits import is_mismatch
from orchestrator.diagnosis.cause.hang_event import facts_of
from orchestrator.diagnosis.dumps.group_names import axes_of
from orchestrator.diagnosis.dumps.load_evidence import (
    ended_by_class,
    read_folder,
    read_last,
    with_facts,
)
from orchestrator.diagnosis.hang.analyse import analyse
from orchestrator.diagnosis.hang.post_mortem import CLASS, differing
from orchestrator.diagnosis.hang.report import SHOWN, diagnosis_text
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, RankFacts
from orchestrator.errors import JobError
from orchestrator.job.failures.slow_program import KEY, OPEN
from orchestrator.job.incident import Incident
from orchestrator.journal.journal import entries_of


def diagnose_folder(folder: Path) -> tuple[HangEvidence, Diagnosis]:
    """Diagnose a folder of dumps and stacks.

    Raises:
        JobError: the folder has no dump or stack, or none of them can be read.
    """
    scene, last = read_folder(folder), read_last(folder)
    unreadable = {**scene.unreadable, **last.unreadable, **scene.passed_over, **last.passed_over}
    nothing = not (scene.dumps or scene.facts or last.dumps)
    if unreadable and nothing:
        first = list(unreadable.items())[:SHOWN]
        more = len(unreadable) - len(first)
        reasons = "\n".join(f"  {name}: {why}" for name, why in first)
        raise JobError(
            f"no dump or stack in {folder.absolute()} can be read:\n{reasons}"
            + (f"\n  and {more} more" if more > 0 else ""),
            fix="give dumps of the PyTorch flight recorder, as pickle or JSON",
        )
    if nothing:
        raise JobError(
            f"{folder.absolute()} has no dump or stack",
            fix="give the folder of the dumps, or a folder with one subfolder per host; file names"
            " end with the rank: flight-3, rank-3.stacks",
        )
    return judge(scene, last, ended_by_class(folder, CLASS))


def judge(
    scene: HangEvidence, last: HangEvidence, ended: Collection[int]
) -> tuple[HangEvidence, Diagnosis]:
    """Choose between the evidence of a hang and the evidence of ranks that ended, and diagnose it.

    The leader does the same. The hang comes first, because errors of ranks that are stopped after
    a hang are its consequence.

    Args:
        scene: dumps and stacks of ranks that hung.
        last: dumps that ranks wrote as they ended.
        ended: ranks that ended because of mismatched collective sizes.
    """
    stood = bool(scene.dumps) or any(facts.stack for facts in scene.facts.values())
    still = analyse(scene)
    if (stood and still.ranks) or not (last.dumps or (ended and not stood)):
        return scene, still
    mute = {rank: RankFacts(rank=rank) for rank in ended if rank not in last.facts}
    last = with_facts(last, mute)  # ranks that wrote no dump
    after = differing(last, ended)
    return (last, after) if after.ranks or not stood else (scene, still)


class Found(Struct, frozen=True, kw_only=True):
    scene: HangEvidence
    diagnosis: Diagnosis
    attempt: int
    decided: str = ""
    """What ndctl did about the hang."""
    other_cause: str = ""
    """Why the attempt failed, if it did not hang and its dumps do not show why; else empty."""
    in_order: str = ""
    """Says that the job is healthy or succeeded, even if this attempt failed; else empty."""
    doubt: str = ""
    """Why a job that trains, or whose state is unknown, is not called healthy, while no hang was
    detected; else empty."""
    unknown: str = ""
    """Why the present state of the job is unknown, and the last known one; else empty."""


def diagnose_job(snapshot: Snapshot, attempt: int | None) -> Found:
    """Diagnose an attempt of a job; without `attempt` the newest one that hung or left dumps.

    Args:
        snapshot: with the state of the job at its scheduler. Without that, a healthy job whose
            cluster is unreachable would look as if its leader had died.

    Raises:
        JobError: the job has no such attempt.
    """
    run_dir = snapshot.run_dir
    story = story_of(run_dir)
    healthy = in_order(snapshot) if attempt is None else ""
    has_past = attempt is None and (bool(story.hung) or _has_last_dumps(run_dir, story))
    if healthy and not has_past:
        return _by_its_state(story, in_order=healthy)
    doubt = unclear(snapshot) if attempt in (None, story.newest) else ""
    # What an earlier attempt left is true even if the present state is unknown.
    if snapshot.standing.as_of is not None and has_past:
        doubt = ""
    if doubt and story.newest not in story.hung:
        return _by_its_state(story, doubt=doubt, advice=_advice(snapshot))
    if attempt is not None and not 1 <= attempt <= story.newest:
        raise JobError(
            f"{run_dir.path.name} has no attempt {attempt}; it has {story.newest} attempts",
            fix="`ndctl describe JOB` shows the attempt of each incident",
        )
    chosen = _newest_with_evidence(run_dir, story) if attempt is None else attempt
    shown, verdict = _analysed(run_dir, story, chosen)
    verdict = _with_longer_limit(snapshot, chosen, verdict)
    unexplained = verdict.kind == "not-known" and chosen not in story.hung
    return Found(
        scene=shown,
        diagnosis=verdict,
        attempt=chosen,
        decided=decided(snapshot, chosen),
        other_cause=_cause_of(snapshot, chosen, story.newest) if unexplained else "",
        in_order=healthy,
        unknown=last_known(snapshot),
    )


def _with_longer_limit(snapshot: Snapshot, attempt: int, verdict: Diagnosis) -> Diagnosis:
    """The verdict with the advice of its incident, if that has a longer limit for a program that
    may have been only slow."""
    advice = next((one.advice for one in _incidents(snapshot, attempt) if KEY in one.advice), "")
    if not advice or verdict.kind not in OPEN:
        return verdict
    return replace(verdict, advice=f"{verdict.advice}; {advice}")


def _analysed(run_dir: RunDir, story: "Story", attempt: int) -> tuple[HangEvidence, Diagnosis]:
    """The verdict from the dumps, stacks and exits of an attempt, with the evidence that it is
    from."""
    folder = run_dir.traces(attempt)
    there = folder.is_dir()
    scene, last = HangEvidence(), HangEvidence()
    if there:
        scene, last = read_folder(folder, one_attempt=True), read_last(folder)
    # Each rank opens its file of stacks when it starts. Only its host knows whether it was asked.
    scene = replace(scene, facts={r: f for r, f in scene.facts.items() if f.stack or f.ended})
    begun = story.attempts.get(attempt)
    told, unfit = _reported(run_dir, attempt)
    facts = {
        rank: replace(found, stack=found.stack or _stack(scene, rank))
        for rank, found in told.items()
    }
    if begun is not None:
        plan, hosts = begun.plan, begun.hosts
        axes = axes_of(plan.mesh)
        scene = replace(scene, world=plan.world_size, axes=axes)
        facts = _on_hosts({**scene.facts, **facts}, plan, hosts)
        last = with_facts(
            replace(last, world=plan.world_size, axes=axes), _on_hosts({}, plan, hosts)
        )
    ended = {*unfit, *(ended_by_class(folder, CLASS) if there else ())}
    return judge(with_facts(scene, facts), last, ended)


def _by_its_state(
    story: "Story", *, in_order: str = "", doubt: str = "", advice: str = ""
) -> Found:
    """What the state of the job tells; no attempt is analysed. One of the texts is given."""
    verdict = Diagnosis(
        kind="healthy" if in_order else "not-known",
        scope=None,
        ranks=(),
        hosts=(),
        confidence=1.0 if in_order else 0.0,
        cause=in_order or doubt,
        advice=advice,
    )
    return Found(
        scene=HangEvidence(),
        diagnosis=verdict,
        attempt=story.newest,
        in_order=in_order,
        doubt=doubt,
    )


def _advice(snapshot: Snapshot) -> str:
    """The next step for a job with a doubt."""
    if snapshot.standing.as_of is not None:
        return "; ".join(line.strip() for line in next_step(snapshot, None).splitlines())
    return f"to see what the ranks do: {snapshot.commands.of('snapshot')}"


def in_order(snapshot: Snapshot) -> str:
    """Says that a job is healthy, starts or succeeded; else empty. Only the leader decides how long
    a rank may be silent."""
    shown = snapshot.view
    if shown.as_of is not None:
        return ""
    at = progress_steps(shown)
    if shown.state == "SUCCEEDED":
        return f"{shown.name} succeeded: {at}"
    if shown.state in ("SUBMITTED", "PENDING", "STARTING"):
        return f"{shown.name} is {shown.state}: no rank trains yet, and no hang was detected"
    if shown.state != "RUNNING" or _troubles(snapshot):
        return ""
    if shown.quiet_s is None:
        return f"{shown.name} is RUNNING: {at}, and no hang was detected"
    ago = format.duration(shown.quiet_s)
    return f"{shown.name} is healthy: {at}, last step {ago} ago; no late ranks"


def unclear(snapshot: Snapshot) -> str:
    """Says why a job that trains, or whose present state is unknown, is not called healthy; else
    empty."""
    shown, troubles = snapshot.view, _troubles(snapshot)
    if shown.as_of is not None:
        broke = _incidents(snapshot, snapshot.seen.attempt)
        return "" if broke else f"{last_known(snapshot)}, and no hang was detected"
    if shown.state != "RUNNING" or not troubles:
        return ""
    return f"{shown.name} is RUNNING, and no hang was detected, but {'; '.join(troubles)}"


def last_known(snapshot: Snapshot) -> str:
    """Why the present state is unknown, and the last known one; empty if the state is known."""
    shown = snapshot.view
    if shown.as_of is None:
        return ""
    age = age_text(snapshot, None)
    return (
        f"{snapshot.standing.reason}\n{shown.name} was {shown.state}{age}: {progress_steps(shown)}"
    )


def _troubles(snapshot: Snapshot) -> list[str]:
    """What is not in order in a job that trains. A step that is late may be the beginning of a hang
    that is not detected yet."""
    shown, failed = snapshot.view, snapshot.seen.checkpoint.failed
    bad = [host for host in shown.hosts if host.worst in UNHEALTHY]
    found = [f"{host.name}: {format.health_text(host.worst)}" for host in bad[:SHOWN]]
    found += [f"{len(bad) - SHOWN:,} more hosts like that"] if len(bad) > SHOWN else []
    if shown.late_s is not None:
        found.append(f"{progress_steps(shown)} was {format.duration(shown.late_s)} ago")
    if failed is not None:
        found.append(f"the save at step {failed.step:,} failed: {format.shorten(failed.why)}")
    return found


def _incidents(snapshot: Snapshot, attempt: int) -> list[Incident]:
    return [one for one in snapshot.seen.run.history.incidents if one.attempt == attempt]


def _cause_of(snapshot: Snapshot, attempt: int, newest: int) -> str:
    """Cause and culprit of the last incident of an attempt, or why the job does not train; empty
    without either."""
    if broke := _incidents(snapshot, attempt):
        return f"{format.one_line(broke[-1].cause)}; {format.culprit_text(broke[-1].culprit)}"
    # A leader that was killed records no incident, a person who cancels a job causes none, and the
    # incident of a rank that has just ended is recorded once all others have.
    over = attempt == newest and snapshot.standing.state != "RUNNING"
    return format.split_fix(snapshot.standing.reason)[0] if over else ""


def decided(snapshot: Snapshot, attempt: int) -> str:
    """What ndctl did about the last incident of an attempt; empty if nothing yet."""
    broke = _incidents(snapshot, attempt)
    return action_taken(broke[-1], "") if broke else ""


class Begun(Struct, frozen=True):
    """Plan and hosts of an attempt."""

    plan: Plan
    hosts: tuple[str, ...]
    """In node-rank order."""


@dataclass(slots=True)
class Story:
    """The attempts in a journal."""

    attempts: dict[int, Begun] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    """Attempts that hung, as seen by ndctl or by the NCCL watchdog, oldest first."""

    @property
    def newest(self) -> int:
        return max(self.attempts, default=0)


KINDS = (JobSubmitted, Replanned, StartAttempt, HangDetected, HangJudged, HangOver)


def story_of(run_dir: RunDir) -> Story:
    story, plans = Story(), dict[int, Plan]()
    for entry in entries_of(run_dir.journal, *KINDS):
        match entry.event:
            case JobSubmitted(plan=plan, plan_number=number):
                plans[number] = plan
            case Replanned(plan=plan, plan_number=number):
                plans[number] = plan
            case HangDetected(attempt=attempt) | HangJudged(attempt=attempt):
                story.hung.append(attempt)
            case HangOver() if story.hung:
                story.hung.pop()
        for order in entry.actions:
            if isinstance(order, StartAttempt):
                story.attempts[order.attempt] = Begun(plans[order.plan], order.hosts)
    return story


def _has_last_dumps(run_dir: RunDir, story: Story) -> bool:
    """Whether ranks of any attempt wrote a dump as they ended."""
    attempts = range(1, story.newest + 1)
    return any(any(run_dir.traces(number).glob(f"{LAST_FILES}*")) for number in attempts)


def _reported(run_dir: RunDir, attempt: int) -> tuple[dict[int, RankFacts], set[int]]:
    """Facts that hosts reported about ranks, and the ranks that ended because of their sizes."""
    facts: dict[int, RankFacts] = {}
    unfit: set[int] = set()
    for entry in entries_of(run_dir.journal, EvidenceGathered, RankExited, attempt=attempt):
        match entry.event:
            case EvidenceGathered() as found:
                facts |= facts_of(found)
            case RankExited() as exited if is_mismatch(exited):
                unfit.add(exited.rank)
    return facts, unfit


def _stack(scene: HangEvidence, rank: int) -> tuple[str, ...]:
    """The stack from the traces; the journal of a large job does not hold stacks."""
    facts = scene.facts.get(rank)
    return facts.stack if facts else ()


def _newest_with_evidence(run_dir: RunDir, story: Story) -> int:
    if story.hung:
        return story.hung[-1]
    with_files = (n for n in range(story.newest, 0, -1) if _has_evidence(run_dir.traces(n)))
    return next(with_files, story.newest)


def _has_evidence(folder: Path) -> bool:
    """Whether something was written there: each rank opens its file of stacks when it starts."""
    return any(file.stat().st_size for file in folder.glob("*"))


def _on_hosts(
    facts: dict[int, RankFacts], plan: Plan, hosts: tuple[str, ...]
) -> dict[int, RankFacts]:
    """Facts of every rank with its host, also of ranks without other facts."""
    return {
        rank: replace(
            facts.get(rank, RankFacts(rank=rank)), host=hosts[rank // plan.ranks_per_host]
        )
        for rank in range(plan.world_size)
    }


def job_text(found: Found) -> str:
    """Says first if the job is healthy, and nothing more if no attempt failed."""
    if found.diagnosis.kind == "healthy":
        return found.in_order
    if found.doubt:
        return f"{found.doubt}\nnext        {found.diagnosis.advice}"
    if found.other_cause:
        told = f"attempt {found.attempt} did not hang: {found.other_cause}"
        told += f"\nndctl did   {found.decided}" if found.decided else ""
    else:
        told = diagnosis_text(found.diagnosis, found.scene, found.attempt, found.decided)
    before = f"{found.unknown}\n" if found.unknown else ""
    if found.in_order:
        before = f"{found.in_order}\nan earlier attempt failed:\n"
    return before + told


def job_json(found: Found) -> dict[str, Any]:
    body = diagnosis_json(found.scene, found.diagnosis, found.attempt)
    return {**body, "decided": found.decided, "healthy": bool(found.in_order)}


def diagnosis_json(
    scene: HangEvidence, diagnosis: Diagnosis, attempt: int | None = None
) -> dict[str, Any]:
    """The verdict and the evidence. `attempt` is null for a folder."""
    return {
        "attempt": attempt,
        **to_builtins(diagnosis),
        "rank_hosts": {str(rank): scene.host(rank) for rank in diagnosis.ranks},
        "num_dumps": len(scene.dumps),
        "num_stacks": sum(bool(facts.stack) for facts in scene.facts.values()),
        "unreadable": dict(scene.unreadable),
        "passed_over": dict(scene.passed_over),
    }
