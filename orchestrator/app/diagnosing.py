"""Who holds a job up: `ndctl diagnose`, on what a job of ours or anybody's left behind."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orchestrator.contract.events import EvidenceGathered, HangDetected
from orchestrator.contract.plan import Plan
from orchestrator.contract.rundir import RunDir
from orchestrator.diagnosis.analyse import analyse
from orchestrator.diagnosis.axes import axes_of
from orchestrator.diagnosis.facts import Diagnosis, RankFacts, Scene
from orchestrator.diagnosis.folder import read_folder, with_facts
from orchestrator.errors import JobError
from orchestrator.supervise.judgement import facts_of
from orchestrator.supervise.log import Entry, read
from orchestrator.supervise.state import Run
from orchestrator.supervise.step import step


def diagnose_folder(folder: Path) -> tuple[Scene, Diagnosis]:
    """Of a folder of dumps and stacks.

    Raises:
        JobError: there is nothing in it that could be evidence.
    """
    scene = read_folder(folder)
    if not (scene.dumps or scene.facts or scene.unreadable):
        raise JobError(
            f"{folder.absolute()} holds no dump and no stack",
            fix="name the folder that holds them, each with its rank in its name: flight-3,"
            " rank-3.stacks",
        )
    return scene, analyse(scene)


def diagnose_job(run_dir: RunDir, attempt: int | None) -> tuple[Scene, Diagnosis]:
    """Of the job's attempt, or its newest that hung or left dumps."""
    entries = read(run_dir.journal)
    run = Run()
    placements: dict[int, tuple[Plan, tuple[str, ...]]] = {}
    for entry in entries:
        run, _ = step(run, entry.event)
        if run.placement:
            placements[run.attempt] = (run.plan, run.placement)
    chosen = _newest_evident(run_dir, entries, run.attempt) if attempt is None else attempt
    folder = run_dir.traces(chosen)
    scene = read_folder(folder) if folder.is_dir() else Scene()
    plan, hosts = placements.get(chosen, (None, ()))
    facts = {
        rank: replace(found, stack=found.stack or _stack(scene, rank))
        for rank, found in _facts(entries, chosen).items()
    }
    if plan is not None:
        scene = replace(scene, world=plan.world_size, axes=axes_of(plan.mesh))
        facts = _on_hosts({**scene.facts, **facts}, plan, hosts)
    scene = with_facts(scene, facts)
    return scene, analyse(scene)


def _stack(scene: Scene, rank: int) -> tuple[str, ...]:
    """Of the traces: the journal of a large job has none."""
    facts = scene.facts.get(rank)
    return facts.stack if facts else ()


def _newest_evident(run_dir: RunDir, entries: Iterable[Entry], newest: int) -> int:
    hung = [entry.event.attempt for entry in entries if isinstance(entry.event, HangDetected)]
    if hung:
        return hung[-1]
    with_files = [n for n in range(newest, 0, -1) if any(run_dir.traces(n).glob("*"))]
    return with_files[0] if with_files else newest


def _facts(entries: Iterable[Entry], attempt: int) -> dict[int, RankFacts]:
    facts: dict[int, RankFacts] = {}
    for entry in entries:
        event = entry.event
        if isinstance(event, EvidenceGathered) and event.attempt == attempt:
            facts |= facts_of(event.host, event.ranks, event.withheld)
    return facts


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


def diagnosis_json(scene: Scene, diagnosis: Diagnosis) -> dict[str, Any]:
    """For scripts: the verdict, and what it was made of."""
    return {
        **asdict(diagnosis),
        "rank_hosts": {str(rank): scene.host(rank) for rank in diagnosis.ranks},
        "num_dumps": len(scene.dumps),
        "num_stacks": sum(bool(facts.stack) for facts in scene.facts.values()),
        "unreadable": dict(scene.unreadable),
    }
