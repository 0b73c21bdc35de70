"""A plan that did not fit into the devices' memory, although the planner expected it to.

The planner is asked again, with a little less memory than it expected for this plan. So no plan
comes twice, and each one needs less than the one before.
"""

import re

from msgspec.structs import replace

from orchestrator.contract.messages.actions import Replan
from orchestrator.contract.spec.failures import Reading
from orchestrator.diagnosis.cause.exits import class_notes
from orchestrator.diagnosis.cause.verdict import Verdict
from orchestrator.job.failures.policy import ON_PROCESSORS
from orchestrator.job.incident import PREFLIGHT
from orchestrator.job.plans import Shortage
from orchestrator.job.state import Run, with_deadline
from orchestrator.plan.figures import show_bytes

DEVICE = "cuda-out-of-memory"
HOST = "host-out-of-memory"
"""On a machine without GPUs this is the memory of the devices."""
LESS = 0.95
MOST_REFITS = 3
"""Plans for less memory since a person submitted the job, at most."""
ANSWER_S = 120.0
"""Seconds for the planner to answer."""
CAPACITY = re.compile(r"total capacity of ([\d.]+) (GiB|MiB)")
HELD = re.compile(r"Process (\d+) has ([\d.]+) (GiB|MiB) memory in use")
"""Other processes on the device, in torch's message. They can be ranks of this job that were given
the same device."""
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20}


def is_of_the_plan(run: Run, verdict: Verdict) -> bool:
    """A plan that needs less device memory can help."""
    if run.plan.memory is None:  # the user's own program, which ndctl cannot plan
        return False
    name = verdict.failure.name if verdict.failure else ""
    if name == DEVICE:
        return not _held_by_others(run, verdict)
    return name == HOST and run.plan.profile == ON_PROCESSORS


def with_holders(run: Run, verdict: Verdict, failure: Reading) -> Verdict:
    """The verdict with other advice, if the plan fits the device and other processes hold so much
    of it that it does not: a smaller plan would be the wrong answer."""
    if not (held := _held_by_others(run, verdict)):
        return verdict
    host = verdict.culprit.host
    advice = (
        f"other processes hold memory of the device that the plan counted as free ({held}; the"
        f" plan needs {show_bytes(run.plan.needs.peak_bytes)}): `nvidia-smi` on {host} shows whose"
        " they are. End what an earlier job left, or give each rank a device of its own"
    )
    failure = replace(failure, advice=advice)
    notes = tuple(n for n in verdict.evidence.notes if not n.startswith(f"class {DEVICE} "))
    evidence = replace(verdict.evidence, notes=(*notes, *class_notes(failure)))
    return replace(verdict, failure=failure, evidence=evidence)


def _held_by_others(run: Run, verdict: Verdict) -> str:
    """Which processes hold how much; empty if the plan alone would not have fitted either."""
    capacity, memory = told(verdict), run.plan.memory
    if memory is None:
        return ""
    peak = memory.peak_bytes
    found = {
        pid: float(size) * UNITS[unit]
        for text in _texts(verdict)
        for pid, size, unit in HELD.findall(text)
    }
    if capacity is None or not peak <= capacity < peak + sum(found.values()):
        return ""
    return ", ".join(f"process {pid} {show_bytes(int(size))}" for pid, size in found.items())


def no_help(verdict: Verdict) -> str:
    """Why the job stops although a rule says to replan."""
    name = verdict.failure.name if verdict.failure else verdict.kind
    advice = verdict.failure.advice if verdict.failure else ""
    why = f"the job was stopped: no plan for the devices helps {name}"
    return f"{why}; {advice}" if advice else why


def shortage_of(run: Run, verdict: Verdict, words: str, *, adopt: bool) -> Shortage:
    """The shortage after this plan did not fit: how much memory the planner may use."""
    plan = run.plan
    known = (
        plan.needs.peak_bytes,
        run.plans.device_bytes,
        plan.needs.device_bytes,
        told(verdict),
    )
    least = min(size for size in known if size)
    spent = adopt and run.plans.refits >= MOST_REFITS
    if spent:
        words = f"{words}; {MOST_REFITS} plans for less memory did not fit either"
    return Shortage(device_bytes=int(LESS * least), adopt=adopt and not spent, words=words)


def told(verdict: Verdict) -> int | None:
    """The device's memory in torch's message."""
    found = next((match for text in _texts(verdict) if (match := CAPACITY.search(text))), None)
    return int(float(found[1]) * UNITS[found[2]]) if found else None


def _texts(verdict: Verdict) -> tuple[str, ...]:
    return (verdict.cause, *verdict.evidence.log_tail, verdict.evidence.traceback)


def look(run: Run, at: float, short: Shortage) -> tuple[Run, tuple[Replan, ...]]:
    """Ask the planner. The job waits for the answer."""
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
    """Adds the ways out to the incident, and returns the reason for the end of the job."""
    assert run.plans.shortage is not None
    # Hosts may have failed a check while the planner was asked.
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
