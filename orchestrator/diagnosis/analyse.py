"""Who is to blame when ranks stand still.

Ranks wait in operations, operations wait for ranks: the graph of both is followed to those who wait
for nobody. Process states and stacks confirm it, or stand in where dumps are missing. Where the
evidence does not single anybody out, that is the verdict, and no host is blamed.
"""

from dataclasses import replace

from orchestrator.diagnosis.absent import not_waiting, went_past, without_dumps
from orchestrator.diagnosis.case import Case
from orchestrator.diagnosis.facts import Diagnosis, Kind, Scene
from orchestrator.diagnosis.mismatch import mismatch, skipped, strayed
from orchestrator.diagnosis.nobody import network, not_known, together
from orchestrator.diagnosis.waits import elsewhere, left_inside, never_entered
from orchestrator.diagnosis.words import ranks_words

FOLLOWS: tuple[Kind, ...] = ("never-entered", "left-inside", "alone", "stopped")
"""Kinds of verdict that a rank comes to also because it does not run."""


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
    did not call an operation is what follows from it. Not so of one that called something else."""
    states = {case.odd_states.get(rank) for rank in found.ranks}
    state = states.pop() if len(states) == 1 else None
    if state is None or found.kind not in FOLLOWS:
        return found
    verb = "is" if len(found.ranks) == 1 else "are"
    what = f"{ranks_words(found.ranks)} {verb} {state}"
    signs = tuple(sign for sign in found.evidence if sign != f"its process is {state}")
    if found.kind != "stopped":
        subject = "it " if len(found.ranks) == 1 else "they "
        what = f"{what}; {subject}{found.cause.removeprefix(f'{ranks_words(found.ranks)} ')}"
    return replace(found, kind="stopped", cause=what, evidence=signs)
