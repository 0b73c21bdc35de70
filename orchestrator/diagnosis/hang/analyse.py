"""Who is to blame when ranks stand still.

Ranks wait in operations, operations wait for ranks: the graph of both is followed to those who wait
for nobody. Process states and stacks confirm it, or stand in where dumps are missing. Where the
evidence does not single anybody out, that is the verdict, and no host is blamed.
"""

from dataclasses import replace

from orchestrator.diagnosis.hang.evidence_index import STARVED, Case
from orchestrator.diagnosis.hang.mismatch import mismatch, skipped, strayed
from orchestrator.diagnosis.hang.missing_dumps import not_waiting, went_past, without_dumps
from orchestrator.diagnosis.hang.report import ranks_words
from orchestrator.diagnosis.hang.unattributed import network, not_known, together
from orchestrator.diagnosis.hang.verdicts import Diagnosis, Kind, Scene
from orchestrator.diagnosis.hang.wait_graph import elsewhere, left_inside, never_entered

FOLLOWS: tuple[Kind, ...] = ("never-entered", "left-inside", "alone", "stopped")
"""Kinds of verdict that a rank comes to also because it does not run."""
FOR_STARVED = (
    "see what else runs on its host (top), and how many processors the job has there: cpus_per_task"
    " of Slurm, the limits of a pod, cpu.max of the control group"
)


def analyse(scene: Scene) -> Diagnosis:
    """The verdict on a standstill."""
    case = Case(scene)
    found = (
        mismatch(case)
        or elsewhere(case)
        or strayed(case)
        or never_entered(case)
        or left_inside(case)
        or skipped(case)
        or not_waiting(case)
        or went_past(case)
        or never_entered(case, guess=True)
        or without_dumps(case)
        or network(case)
        or together(case)
        or not_known(case)
    )
    found = _most_direct_first(case, found)
    return replace(found, num_waiting=len(case.waiters), no_dump=case.no_dump)


def _most_direct_first(case: Case, found: Diagnosis) -> Diagnosis:
    """Of a rank whose process is stopped, gone or stuck in the kernel that is the news, and that it
    did not call an operation is what follows from it. Not so of one that called something else.
    The same of a rank that gets no processor, for which its host need not be to blame."""
    how = case.how_it_is(found.ranks) if found.kind in FOLLOWS else ""
    if not how:
        return found
    starved = how.startswith(STARVED)
    verb = "is" if len(found.ranks) == 1 else "are"
    what = f"{ranks_words(found.ranks)} {verb} {how}"
    said = (f"its process is {case.odd_states.get(found.ranks[0])}", f"it is {STARVED}")
    signs = tuple(sign for sign in found.evidence if sign not in said)
    if found.kind != "stopped" or starved:
        subject = "it " if len(found.ranks) == 1 else "they "
        what = f"{what}; {subject}{found.cause.removeprefix(f'{ranks_words(found.ranks)} ')}"
    if starved:
        return replace(found, cause=what, evidence=signs, hosts=(), advice=FOR_STARVED)
    return replace(found, kind="stopped", cause=what, evidence=signs)
