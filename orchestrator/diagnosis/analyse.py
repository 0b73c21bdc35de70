"""Who is to blame when ranks stand still.

Ranks wait in operations, operations wait for ranks: the graph of both is followed to those who wait
for nobody. Process states and stacks confirm it, or stand in where dumps are missing. Where the
evidence does not single anybody out, that is the verdict, and no host is blamed.
"""

from dataclasses import replace

from orchestrator.diagnosis.absent import not_waiting, went_past, without_dumps
from orchestrator.diagnosis.case import Case
from orchestrator.diagnosis.facts import Diagnosis, Scene
from orchestrator.diagnosis.mismatch import mismatch, skipped, strayed
from orchestrator.diagnosis.nobody import network, not_known, together
from orchestrator.diagnosis.waits import elsewhere, left_inside, never_entered


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
    return replace(found, num_waiting=len(case.waiters), no_dump=case.no_dump)
