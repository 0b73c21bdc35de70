"""Who holds a job up: `ndctl diagnose`, on what a job of ours or anybody's left behind."""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

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
from orchestrator.dashboard.snapshot import Snapshot, read_snapshot
from orchestrator.dashboard.status import action_taken
from orchestrator.dashboard.view import UNHEALTHY
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
from orchestrator.diagnosis.hang.verdicts import Diagnosis, RankFacts, Scene
from orchestrator.errors import JobError
from orchestrator.job.failures.collective_mismatch import is_unfit
from orchestrator.job.failures.hang_event import facts_of
from orchestrator.journal.journal import having


def diagnose_folder(folder: Path) -> tuple[Scene, Diagnosis]:
    """Of a folder of dumps and stacks.

    Raises:
        JobError: there is nothing in it that could be evidence, or none of it can be read.
    """
    scene, last = read_folder(folder), read_last(folder)
    unreadable = {**scene.unreadable, **last.unreadable, **scene.passed_over, **last.passed_over}
    nothing = not (scene.dumps or scene.facts or last.dumps)
    if unreadable and nothing:
        first = list(unreadable.items())[:SHOWN]
        more = len(unreadable) - len(first)
        reasons = "\n".join(f"  {name}: {why}" for name, why in first)
        raise JobError(
            f"{folder.absolute()} holds no dump and no stack that can be read:\n{reasons}"
            + (f"\n  and {more} more" if more > 0 else ""),
            fix="dumps are what torch's flight recorder writes, as pickle or JSON",
        )
    if nothing:
        raise JobError(
            f"{folder.absolute()} holds no dump and no stack",
            fix="name the folder that holds them, or one of them for each host, each with its rank"
            " in its name: flight-3, rank-3.stacks",
        )
    return judge(scene, last, ended_by_class(folder, CLASS))


def judge(scene: Scene, last: Scene, ended: Collection[int]) -> tuple[Scene, Diagnosis]:
    """Of ranks that stood still and of what others, or the same, had called when they ended; those
    in `ended` were ended over sizes. Which of both scenes tells who it was, and the verdict.

    As the leader has it: that which stood still first, for what ranks that are stopped then raise
    is a consequence.
    """
    stood = bool(scene.dumps) or any(facts.stack for facts in scene.facts.values())
    still = analyse(scene)
    if (stood and still.ranks) or not (last.dumps or (ended and not stood)):
        return scene, still
    mute = {rank: RankFacts(rank=rank) for rank in ended if rank not in last.facts}
    last = with_facts(last, mute)  # they are ranks of the job, and wrote nothing
    after = differing(last, ended)
    return (last, after) if after.ranks or not stood else (scene, still)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What `ndctl diagnose` says of a job."""

    scene: Scene
    diagnosis: Diagnosis
    attempt: int
    decided: str = ""
    """What ndctl did about it."""
    in_order: str = ""
    """That the job runs or ended as it should, whatever happened to this attempt."""


def diagnose_job(run_dir: RunDir, attempt: int | None, now: float) -> Found:
    """Of the job's attempt, or its newest that hung or left dumps.

    Raises:
        JobError: the job has no such attempt.
    """
    story, snapshot = story_of(run_dir), read_snapshot(run_dir, now)
    healthy = in_order(snapshot) if snapshot and attempt is None else ""
    if healthy and not story.hung and not _ended_over_something(run_dir, story):
        verdict = Diagnosis(
            kind="healthy", scope=None, ranks=(), hosts=(), confidence=1.0, cause=healthy
        )
        return Found(scene=Scene(), diagnosis=verdict, attempt=story.newest, in_order=healthy)
    if attempt is not None and not 1 <= attempt <= story.newest:
        raise JobError(
            f"{run_dir.path.name} has no attempt {attempt}; {story.newest} were started",
            fix="`ndctl describe JOB` names the attempt of each incident",
        )
    chosen = _newest_evident(run_dir, story) if attempt is None else attempt
    folder = run_dir.traces(chosen)
    there = folder.is_dir()
    scene, last = Scene(), Scene()
    if there:
        scene, last = read_folder(folder, one_attempt=True), read_last(folder)
    begun = story.attempts.get(chosen)
    told, unfit = _told(run_dir, chosen)
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
    shown, verdict = judge(with_facts(scene, facts), last, ended)
    did_then = decided(snapshot, chosen)
    return Found(scene=shown, diagnosis=verdict, attempt=chosen, decided=did_then, in_order=healthy)


def in_order(snapshot: Snapshot) -> str:
    """That a job runs, or ended, as it should, in words; empty where it does not. How long a rank
    may be silent is for its leader to say, which looks into it then."""
    shown = snapshot.view
    at = f"step {shown.step:,} of {shown.steps:,}"
    if shown.state == "SUCCEEDED":
        return f"{shown.name} ended in order: {at}"
    silent = [health for host in shown.hosts for health in host.ranks if health in UNHEALTHY]
    if shown.state != "RUNNING" or shown.quiet_s is None or silent:
        return ""
    ago = format.duration(shown.quiet_s)
    return f"{shown.name} is healthy: {at}, last step {ago} ago; no rank is late"


def decided(snapshot: Snapshot | None, attempt: int) -> str:
    """What was done about what broke in an attempt; empty where nothing was yet."""
    incidents = snapshot.seen.run.incidents if snapshot else ()
    broke = [one for one in incidents if one.attempt == attempt]
    return action_taken(broke[-1], "") if broke else ""


@dataclass(frozen=True, slots=True)
class Begun:
    """An attempt, as it was ordered."""

    plan: Plan
    hosts: tuple[str, ...]
    """In node-rank order."""


@dataclass(slots=True)
class Story:
    """A journal, as far as it tells which attempts there were."""

    attempts: dict[int, Begun] = field(default_factory=dict)
    hung: list[int] = field(default_factory=list)
    """Attempts that did, seen by ndctl or by a watchdog, oldest first."""

    @property
    def newest(self) -> int:
        return max(self.attempts, default=0)


KINDS = (JobSubmitted, Replanned, StartAttempt, HangDetected, HangJudged, HangOver)


def story_of(run_dir: RunDir) -> Story:
    story, plans = Story(), dict[int, Plan]()
    for entry in having(run_dir.journal, *KINDS):
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


def _ended_over_something(run_dir: RunDir, story: Story) -> bool:
    """Whether ranks of an attempt wrote as they ended what they had called."""
    attempts = range(1, story.newest + 1)
    return any(any(run_dir.traces(number).glob(f"{LAST_FILES}*")) for number in attempts)


def _told(run_dir: RunDir, attempt: int) -> tuple[dict[int, RankFacts], set[int]]:
    """What hosts told of its ranks, and those that ended over sizes."""
    facts: dict[int, RankFacts] = {}
    unfit: set[int] = set()
    for entry in having(run_dir.journal, EvidenceGathered, RankExited, attempt=attempt):
        match entry.event:
            case EvidenceGathered() as found:
                facts |= facts_of(found)
            case RankExited() as exited if is_unfit(exited):
                unfit.add(exited.rank)
    return facts, unfit


def _stack(scene: Scene, rank: int) -> tuple[str, ...]:
    """Of the traces: the journal of a large job has none."""
    facts = scene.facts.get(rank)
    return facts.stack if facts else ()


def _newest_evident(run_dir: RunDir, story: Story) -> int:
    if story.hung:
        return story.hung[-1]
    with_files = [n for n in range(story.newest, 0, -1) if any(run_dir.traces(n).glob("*"))]
    return with_files[0] if with_files else story.newest


def _on_hosts(
    facts: dict[int, RankFacts], plan: Plan, hosts: tuple[str, ...]
) -> dict[int, RankFacts]:
    """Every rank with its host, whether or not anything else is known of it."""
    return {
        rank: replace(
            facts.get(rank, RankFacts(rank=rank)), host=hosts[rank // plan.ranks_per_host]
        )
        for rank in range(plan.world_size)
    }


def job_text(found: Found) -> str:
    """Of a job in order that it is, first, and nothing else where nothing else was."""
    if found.diagnosis.kind == "healthy":
        return found.in_order
    told = diagnosis_text(found.diagnosis, found.scene, found.attempt, found.decided)
    before = f"{found.in_order}\nof an attempt that failed:\n" if found.in_order else ""
    return before + told


def job_json(found: Found) -> dict[str, Any]:
    body = diagnosis_json(found.scene, found.diagnosis, found.attempt)
    return {**body, "decided": found.decided, "healthy": bool(found.in_order)}


def diagnosis_json(
    scene: Scene, diagnosis: Diagnosis, attempt: int | None = None
) -> dict[str, Any]:
    """For scripts: the verdict, and what it was made of; `attempt` is null for a folder's."""
    return {
        "attempt": attempt,
        **asdict(diagnosis),
        "rank_hosts": {str(rank): scene.host(rank) for rank in diagnosis.ranks},
        "num_dumps": len(scene.dumps),
        "num_stacks": sum(bool(facts.stack) for facts in scene.facts.values()),
        "unreadable": dict(scene.unreadable),
        "passed_over": dict(scene.passed_over),
    }
