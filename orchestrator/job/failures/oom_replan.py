"""A plan that did not fit into the devices' memory, though it was believed to.

The planner has what helps: it is asked again, with as much memory as this plan was believed to take
and a little less. So no plan comes twice, and each one takes less than the one before.
"""

import re
from dataclasses import replace

from orchestrator.contract.messages.actions import Replan
from orchestrator.diagnosis.cause.verdict import Verdict
from orchestrator.job.failures.policy import ON_PROCESSORS
from orchestrator.job.incident import PREFLIGHT
from orchestrator.job.plans import Shortage
from orchestrator.job.state import Run, with_deadline

DEVICE = "cuda-out-of-memory"
HOST = "host-out-of-memory"
"""On a machine whose devices are its processors this is the devices' memory."""
LESS = 0.95
MOST_REFITS = 3
"""So often a plan for less memory is taken since a person submitted the job."""
ANSWER_S = 120.0
"""For the planner to answer."""
CAPACITY = re.compile(r"total capacity of ([\d.]+) (GiB|MiB)")
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}


def is_of_the_plan(run: Run, verdict: Verdict) -> bool:
    """Whether a plan that takes less memory on the devices is a way out."""
    name = verdict.failure.name if verdict.failure else ""
    return name == DEVICE or (name == HOST and run.plan.profile == ON_PROCESSORS)


def no_help(verdict: Verdict) -> str:
    """Why the job stops though a rule says to plan anew."""
    name = verdict.failure.name if verdict.failure else verdict.kind
    advice = verdict.failure.advice if verdict.failure else ""
    why = f"the job was stopped: no plan for the devices helps {name}"
    return f"{why}; {advice}" if advice else why


def shortage_of(run: Run, verdict: Verdict, words: str, *, adopt: bool) -> Shortage:
    """What is believed of a device after this plan did not fit into it."""
    plan = run.plan
    known = (
        plan.memory.peak_bytes,
        run.plans.device_bytes,
        plan.memory.device_bytes,
        told(verdict),
    )
    least = min(size for size in known if size)
    spent = adopt and run.plans.refits >= MOST_REFITS
    if spent:
        words = f"{words}; {MOST_REFITS} plans for less memory did not fit either"
    return Shortage(device_bytes=int(LESS * least), adopt=adopt and not spent, words=words)


def told(verdict: Verdict) -> int | None:
    """What torch says that the device has."""
    texts = (verdict.cause, *verdict.evidence.log_tail, verdict.evidence.traceback)
    found = next((match for text in texts if (match := CAPACITY.search(text))), None)
    return int(float(found[1]) * UNITS[found[2]]) if found else None


def look(run: Run, at: float, short: Shortage) -> tuple[Run, tuple[Replan, ...]]:
    """Ask the planner; the job waits for its answer."""
    order = Replan(
        hosts=len(run.plan.hosts),
        reason=short.words,
        device_bytes=short.device_bytes,
        adopt=short.adopt,
    )
    run = replace(run, plans=replace(run.plans, shortage=short))
    return with_deadline(run, at + ANSWER_S), (order,)


def with_ways_out(
    run: Run, why: str, ways: tuple[str, ...] = (), edits: tuple[str, ...] = ()
) -> tuple[Run, str]:
    """The incident knows what a person can do; and the words to end with."""
    assert run.plans.shortage is not None
    # Hosts may have been found wanting while the planner was asked.
    number = max(n for n, one in enumerate(run.history.incidents) if one.kind != PREFLIGHT)
    last = run.history.incidents[number]
    notes = tuple(f"way out: {way}" for way in ways) or (f"no way out was found: {why}",)
    evidence = replace(last.evidence, notes=(*last.evidence.notes, *notes))
    advice = f"resume with one of: {'; '.join(ways)}" if ways else last.advice
    incident = replace(last, evidence=evidence, advice=advice, edits=edits)
    incidents = (*run.history.incidents[:number], incident, *run.history.incidents[number + 1 :])
    run = replace(
        run,
        history=replace(run.history, incidents=incidents),
        plans=replace(run.plans, shortage=None),
    )
    if not ways:
        return run, f"{last.action}; no plan that takes less memory: {why}"
    many = f"{len(ways)} ways out are" if len(ways) > 1 else "one way out is"
    return run, f"{last.action}; {many} known, the cheapest {ways[0]}"
