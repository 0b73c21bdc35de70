"""Verdicts that blame nobody."""

from collections.abc import Iterator

from orchestrator.diagnosis.hang.evidence_index import SHOWN, Case, named
from orchestrator.diagnosis.hang.report import ranks_words
from orchestrator.diagnosis.hang.verdicts import Diagnosis
from orchestrator.diagnosis.stacks import python_stacks


def network(case: Case) -> Diagnosis | None:
    inside = [s for s in case.stuck if not (s.missing or s.unknown or s.out)]
    idle = {rank for stuck in case.stuck for rank in stuck.missing} - case.waiters
    if not inside or idle or any(stuck.unknown or stuck.lacks for stuck in case.stuck):
        return None
    groups = [stuck for stuck in inside if len(stuck.entered) > 1]
    if not groups:
        return None
    return Diagnosis(
        kind="network",
        scope="fabric",
        ranks=(),
        hosts=(),
        confidence=0.5,
        cause=f"all members called {named(groups[0])} and none came out:"
        " the network between them, or a device",
        evidence=(f"in {len(inside)} groups no member is missing, and all else waits for them",),
        waiting=tuple(case.waiting(stuck) for stuck in inside[:SHOWN]),
        advice="look at the links of these hosts (ibstat, nvidia-smi nvlink -e, the kernel's"
        " log); a second time on the same hosts, check them together",
    )


def together(case: Case) -> Diagnosis | None:
    known = {python_stacks.place(stack) for stack in case.stacks.values()}
    if case.stuck or len(known) != 1 or len(case.stacks) < 2:
        return None
    stack = next(iter(case.stacks.values()))
    return Diagnosis(
        kind="together",
        scope=None,
        ranks=(),
        hosts=(),
        confidence=0.6,
        cause=f"all {len(case.stacks)} ranks are in {stack[0]}, and none waits for another",
        evidence=("their stacks are the same",),
        advice="what they all wait for is shared: storage, a server, or the program itself",
    )


def not_known(case: Case) -> Diagnosis:
    if not case.scene.dumps and not case.scene.facts:
        cause = "there is no evidence: no dump and no stack was found"
    elif not case.stuck:
        cause = "no rank waits in an operation that is recorded, and no stack stands out"
    else:
        cause = f"{len(case.waiters)} ranks wait, and no rank stands out as the one waited for"
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
        advice="run with TORCH_FR_BUFFER_SIZE set, and dumps and stacks of all ranks gathered",
    )


def _waits_unseen(case: Case) -> Iterator[str]:
    """Of one for whom all others of a group wait, and which itself waits in what no recorder holds,
    as gloo's sends and receives: it left something out, or a message to it was lost."""
    for stuck in case.stuck:
        away = (*stuck.missing, *stuck.unknown)
        rank = away[0] if len(away) == 1 else -1
        stack = case.stacks.get(rank)
        if rank not in case.waiters and stack and python_stacks.talks(stack):
            yield (
                f"all others wait for rank {rank} in {named(stuck)}, and it waits in {stack[0]},"
                " of which its dump says nothing: it left that operation out, or a message to it"
                " was lost"
            )
