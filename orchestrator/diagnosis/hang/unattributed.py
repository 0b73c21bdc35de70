"""Verdicts without a culprit."""

from collections.abc import Iterator

from orchestrator.diagnosis.hang.evidence_index import SHOWN, SURE, EvidenceIndex, named
from orchestrator.diagnosis.hang.groups import Stuck
from orchestrator.diagnosis.hang.mismatch import PATHS
from orchestrator.diagnosis.hang.report import ranks_wait, ranks_words
from orchestrator.diagnosis.hang.verdicts import Diagnosis
from orchestrator.diagnosis.stacks import python_stacks

MOST_THREADS = 3
"""Threads that a verdict names."""


def network(case: EvidenceIndex) -> Diagnosis | None:
    inside = [s for s in case.stuck if not (s.missing or s.unknown or s.out)]
    idle = {rank for stuck in case.stuck for rank in stuck.missing} - case.waiters
    # An idle rank, a rank without a dump or an unlisted member could be what all wait for. Then the
    # network is not to blame.
    if not inside or idle or any(stuck.unknown or stuck.lacks for stuck in case.stuck):
        return None
    # With one caller in each group no data had to pass between ranks.
    groups = [stuck for stuck in inside if len(stuck.entered) > 1]
    if not groups:
        return None
    return Diagnosis(
        kind="network",
        scope="fabric",
        ranks=(),
        hosts=(),
        confidence=0.5,
        cause=f"all members called {named(groups[0])} and it completed on none:"
        " the network between them or a device failed",
        evidence=(f"in {len(inside)} groups no member is missing; all other ranks wait for them",),
        waiting=tuple(case.waiting(stuck) for stuck in inside[:SHOWN]),
        advice="check the links of these hosts (ibstat, nvidia-smi nvlink -e, the kernel log);"
        " if it happens again on the same hosts, test the network between them",
    )


def all_stopped(case: EvidenceIndex) -> Diagnosis | None:
    """No process of the job runs, for one reason: something outside stopped all, so none is the
    culprit. The only rank of a job is such a rank, too."""
    states = set(case.odd_states.values())
    # A rank without facts may still run. Then the others may wait for it, and something outside did
    # not stop the whole job.
    if len(states) != 1 or set(case.odd_states) != case.ranks:
        return None
    state = states.pop()
    return Diagnosis(
        kind="stopped",
        scope=None,
        ranks=(),
        hosts=(),
        confidence=0.9,
        cause=f"{'the only rank' if len(case.ranks) == 1 else 'every rank'} is {state}",
        evidence=(f"the processes of {ranks_words(sorted(case.ranks))} are {state}",),
        advice="find out what stopped the processes: a person, a debugger, the scheduler (suspend),"
        " or storage that all ranks wait for",
    )


def together(case: EvidenceIndex) -> Diagnosis | None:
    known = {python_stacks.place(stack) for stack in case.stacks.values()}
    # A rank that waits in a recorded operation waits for another rank, and one stack cannot be
    # compared.
    if case.stuck or len(known) != 1 or len(case.stacks) < 2:
        return None
    stack = next(iter(case.stacks.values()))
    return Diagnosis(
        kind="together",
        scope=None,
        ranks=(),
        hosts=(),
        confidence=0.6,
        cause=f"all {len(case.stacks)} ranks are in {stack[0]}; none waits for another rank",
        evidence=("all stacks are the same",),
        advice="check what all ranks share: storage, a server, the program itself",
    )


def thread_left(case: EvidenceIndex) -> Diagnosis | None:
    """The program has ended on all ranks, and Python waits for a thread of it on those that run."""
    waits = [rank for rank, stack in case.stacks.items() if python_stacks.joins_threads(stack)]
    # A rank that waits in a recorded operation, or one without a stack, may be what a thread of
    # another rank waits for.
    if not waits or case.stuck or case.odd_states or {*waits, *case.ended} != case.ranks:
        return None
    first = min(waits)
    places = python_stacks.other_threads(case.scene.facts[first].stack)[:MOST_THREADS]
    where = " and ".join(map(str, places))
    seen = f"; rank {first} has a thread in {where}" if where else ""
    return Diagnosis(
        kind="thread",
        scope="user",
        ranks=(),
        hosts=(),
        confidence=SURE,
        cause=f"the program has ended, but one of its non-daemon threads has not{seen}",
        evidence=(f"the main thread of {ranks_words(waits)} waits in {case.stacks[first][0]}",),
        advice="join the thread before the program ends (inside"
        ' `with ndctl.phase("write")` if that takes longer than 2 minutes), or start it with'
        " daemon=True",
    )


def crossed(case: EvidenceIndex) -> Diagnosis | None:
    """Two ranks that wait for each other in operations of two groups."""
    for one in case.stuck:
        places = dict.fromkeys(case.scene.dumps[rank].first for rank in one.missing)
        for other in (case.at[place] for place in places if place in case.at):
            ours, theirs = _waits_first(case, one, other), _waits_first(case, other, one)
            if ours and theirs:
                return _crossed(case, (min(ours), one), (min(theirs), other))
    return None


def _crossed(case: EvidenceIndex, one: tuple[int, Stuck], other: tuple[int, Stuck]) -> Diagnosis:
    (a, of_a), (b, of_b) = sorted((one, other), key=lambda pair: pair[0])
    unseen = [rank for rank in (a, b) if rank not in case.stacks]
    doubt = "if it called that with async_op=True, it may wait for something else"
    return Diagnosis(
        kind="mismatch",
        scope="user",
        ranks=(),
        hosts=(),
        confidence=0.6,
        cause=f"ranks {a} and {b} wait for each other: rank {a} in {named(of_a)}, which rank {b}"
        f" did not call, and rank {b} in {named(of_b)}, which rank {a} did not call",
        evidence=tuple(f"no stack of rank {rank}: {doubt}" for rank in unseen),
        waiting=(case.waiting(of_a), case.waiting(of_b)),
        advice=PATHS,
    )


def _waits_first(case: EvidenceIndex, one: Stuck, other: Stuck) -> set[int]:
    """Ranks that wait in `one` and did not call `other`.

    A rank whose state or stack shows that it waits for something else does not count. A partial
    dump does not show which operations a rank did not call.
    """
    if case.partial:
        return set()
    return {
        rank
        for rank in set(one.entered) & set(other.missing)
        if case.scene.dumps[rank].first == one.group.id
        and rank not in case.odd_states
        and (rank not in case.stacks or python_stacks.talks(case.stacks[rank]))
    }


def not_known(case: EvidenceIndex) -> Diagnosis:
    # The three causes ask for different things next time: collect evidence at all, enable the
    # recorder, or collect it from all ranks.
    if not case.scene.dumps and not case.scene.facts:
        cause = "no dump and no stack was found"
    elif not case.stuck:
        cause = "no rank waits in a recorded operation, and no stack differs from the others"
    else:
        cause = f"{ranks_wait(len(case.waiters))}, and the evidence does not show for which rank"
    signs = list(_waits_unseen(case))
    signs += [f"no dump from {ranks_words(case.no_dump)}"] if case.no_dump else []
    return Diagnosis(
        kind="not-known",
        scope=None,
        ranks=(),
        hosts=(),
        confidence=0.0,
        cause=cause,
        evidence=tuple(signs),
        waiting=tuple(case.waiting(stuck) for stuck in case.stuck[:SHOWN]),
        advice=_what_would_tell(case),
    )


def _what_would_tell(case: EvidenceIndex) -> str:
    if case.ended:
        return f"read the log of {ranks_words(sorted(case.ended))}: did it end too early?"
    if case.no_dump or not case.scene.dumps:
        return "set TORCH_FR_BUFFER_SIZE and collect dumps and stacks of all ranks next time"
    if len(case.stacks) < len(case.ranks):
        return "collect the stacks of all ranks as well next time (`py-spy dump --pid PID`)"
    return "compare the stacks of all ranks, and look at what they share: storage, the program"


def _waits_unseen(case: EvidenceIndex) -> Iterator[str]:
    """A rank that all others of a group wait for, and that waits in an unrecorded operation.

    The recorder of gloo does not record sends and receives. Such a rank skipped an operation, or a
    message to it was lost; the evidence does not show which.
    """
    for stuck in case.stuck:
        away = (*stuck.missing, *stuck.unknown)
        # With several absent members it is open which one the others wait for, so the stack of one
        # of them explains nothing. -1 is no rank.
        rank = away[0] if len(away) == 1 else -1
        stack = case.stacks.get(rank)
        if rank not in case.waiters and stack and python_stacks.talks(stack):
            yield (
                f"all others wait for rank {rank} in {named(stuck)}; rank {rank} waits in"
                f" {stack[0]}, which its dump does not record: it skipped that operation, or a"
                " message to it was lost"
            )
