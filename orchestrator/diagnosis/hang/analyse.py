"""Finds the culprit of a hang.

Ranks wait in operations, and operations wait for ranks. The analysis follows this graph to the
ranks that wait for no other rank. Process states and stacks confirm the result, or replace missing
dumps. If the evidence does not point to one rank, the verdict has no culprit and no host.
"""

from collections import defaultdict
from collections.abc import Mapping

from msgspec.structs import replace

from orchestrator.diagnosis.hang.evidence_index import STARVED, STATES, EvidenceIndex
from orchestrator.diagnosis.hang.mismatch import mismatch, skipped, strayed
from orchestrator.diagnosis.hang.missing_dumps import not_waiting, went_past, without_dumps
from orchestrator.diagnosis.hang.report import ranks_words
from orchestrator.diagnosis.hang.unattributed import (
    all_stopped,
    crossed,
    network,
    not_known,
    thread_left,
    together,
)
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, Kind
from orchestrator.diagnosis.hang.wait_graph import elsewhere, left_inside, never_entered

FOLLOWS: tuple[Kind, ...] = ("never-entered", "left-inside", "alone", "stopped")
"""Kinds of verdict that also follow if the process of the culprit does not run."""
STOPPED = 0.98
"""The confidence if a signal stopped all ranks for which the others wait, and no other process."""
FOR_STOPPED = (
    "find what stopped it (SIGSTOP, Ctrl-Z, a debugger, a batch system that suspends jobs); if the"
    " process is still there, `kill -CONT PID` on its host lets it continue"
)
FOR_STARVED = (
    "check what else runs on the host (top), and how many CPUs the job has there: cpus_per_task of"
    " Slurm, the limits of the pod, cpu.max of the control group"
)


def analyse(scene: HangEvidence) -> Diagnosis:
    """The verdict on a hang: the first check with a result wins, so the order is by reliability."""
    case = EvidenceIndex(scene)
    found = (
        mismatch(case)
        # A certain case comes before weaker signs of a wrong path. Example: a rank may call two
        # axes in another order than its peers without harm, while another rank is stuck.
        or elsewhere(case)
        or strayed(case)
        or never_entered(case)
        or left_inside(case)
        or skipped(case)
        # A program that has ended calls nothing more, so no sign below is one against a rank.
        or thread_left(case)
        # The checks above use dumps. From here on, ranks without a dump are judged by their state
        # or stack.
        or not_waiting(case)
        or went_past(case)
        # Ranks without a dump and without any other sign are named only now. Most hangs with lost
        # dumps have better evidence, such as a stopped process.
        or never_entered(case, guess=True)
        or without_dumps(case)
        # The remaining verdicts name no culprit, so they come after all checks that can name one.
        or network(case)
        or all_stopped(case)
        or together(case)
        or crossed(case)
        or not_known(case)
    )
    found = _most_direct_first(case, found)
    # A person asks first about a rank that is not there any more. It is no sign against that rank:
    # the program may let one end before the others.
    if ended := ended_words(case.ended):
        signs = (*found.evidence, ended)
        told = {"evidence": signs} if found.ranks else {"cause": f"{ended}; {found.cause}"}
        found = replace(found, **told)
    return replace(found, num_waiting=len(case.waiters), no_dump=case.no_dump)


def ended_words(ended: Mapping[int, str]) -> str:
    """`rank 1 had ended (exit code 0)`; empty if no rank had.

    Args:
        ended: rank -> how it had ended.
    """
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, how in sorted(ended.items()):
        alike[how].append(rank)
    return "; ".join(f"{ranks_words(ranks)} had ended ({how})" for how, ranks in alike.items())


def _most_direct_first(case: EvidenceIndex, found: Diagnosis) -> Diagnosis:
    """Puts the state of the culprit's process first, if it explains the verdict.

    Example: a rank with a stopped process did not call an operation, because it is stopped. A rank
    that called another operation did run, so its state is not the cause. A rank without CPU is
    explained the same way, but its host is not excluded: the job's CPU limits may be the cause.
    """
    how = case.how_it_is(found.ranks) if found.kind in FOLLOWS else ""
    # An empty text means one of three things: the process runs, the ranks differ in how they are,
    # or the kind of verdict is not explained by a process that does not run.
    if not how:
        return found
    starved = how.startswith(STARVED)
    verb = "is" if len(found.ranks) == 1 else "are"
    what = f"{ranks_words(found.ranks)} {verb} {how}"
    # The cause now has this sign in its own words, so the evidence does not list it a second time.
    said = (f"its process is {case.odd_states.get(found.ranks[0])}", f"it is {STARVED}")
    signs = tuple(sign for sign in found.evidence if sign not in said)
    # A verdict "stopped" has no more to say than the state. The other kinds keep what the rank did
    # not do, with a pronoun for the ranks that `what` names already.
    if found.kind != "stopped" or starved:
        subject = "it " if len(found.ranks) == 1 else "they "
        what = f"{what}; {subject}{found.cause.removeprefix(f'{ranks_words(found.ranks)} ')}"
    if starved:
        return replace(found, cause=what, evidence=signs, hosts=(), advice=FOR_STARVED)
    return _certain_if_stopped(case, replace(found, kind="stopped", cause=what, evidence=signs))


def _certain_if_stopped(case: EvidenceIndex, found: Diagnosis) -> Diagnosis:
    """A rank that is stopped by a signal does nothing until another signal, so the ranks that wait
    for it cannot go on, whatever the dumps leave open.

    This is not so of the other states: a debugger is often attached because of a hang, a wait in
    the kernel may end, and a rank may be gone because another one failed.
    """
    if {*case.odd_states.items()} != {(rank, STATES["T"]) for rank in found.ranks}:
        return found
    hosts = {case.scene.host(rank) for rank in found.ranks}
    one = tuple(str(host) for host in hosts) if len(hosts) == 1 and None not in hosts else ()
    sure = max(found.confidence, STOPPED)
    return replace(found, confidence=sure, hosts=one, advice=FOR_STOPPED)
