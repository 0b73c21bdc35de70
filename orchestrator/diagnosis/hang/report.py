"""A diagnosis as a person on call wants it: who, how sure, how it is known, what to do."""

from collections.abc import Iterator, Sequence

from orchestrator.diagnosis.hang.verdicts import Diagnosis, Scene, Waiting
from orchestrator.diagnosis.stacks import python_stacks

SHOWN = 8
WIDTH = 12


def ranks_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spans(ranks)}"


def spans(ranks: Sequence[int]) -> str:
    """`0-3, 7`, cut short where they are many."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    words = [str(a) if a == b else f"{a}-{b}" for a, b in found]
    more = len(words) - SHOWN
    return ", ".join(words[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def diagnosis_text(
    diagnosis: Diagnosis, scene: Scene, attempt: int | None = None, decided: str = ""
) -> str:
    """`attempt`: of the job, where it is one of a job of ours; `decided`: what ndctl did, where it
    did something."""
    of_job = [] if attempt is None else [_row("attempt", str(attempt))]
    return "\n".join([*of_job, *_lines(diagnosis, scene, decided)])


def _lines(diagnosis: Diagnosis, scene: Scene, decided: str) -> Iterator[str]:
    yield _row("verdict", f"{diagnosis.kind}: {diagnosis.cause}")
    yield _row("who", _who(diagnosis, scene, decided))
    if decided:
        yield _row("decided", decided)
    yield _row("confidence", f"{diagnosis.confidence:.0%}")
    for sign in diagnosis.evidence:
        yield _row("because", sign)
    for waiting in diagnosis.waiting:
        yield _row("waiting", waiting_words(waiting))
    for line in where_words(scene, diagnosis.ranks):
        yield _row("stacks", line)
    yield _row("evidence", _seen(diagnosis, scene))
    for title, files in (("unreadable", scene.unreadable), ("passed over", scene.passed_over)):
        for name, why in list(files.items())[:SHOWN]:
            yield _row(title, f"{name}: {why}")
        if len(files) > SHOWN:
            yield _row("", f"and {len(files) - SHOWN} more files: --json names them")
    if diagnosis.advice:
        yield _row("do", diagnosis.advice)


def where_words(scene: Scene, first: Sequence[int]) -> list[str]:
    """Where ranks are by their stacks: those of `first` one by one, then those that are in one
    place in one line, the fewest before the most."""
    known = {
        rank: stack
        for rank, facts in sorted(scene.facts.items())
        if (stack := python_stacks.main_stack(facts.stack))
    }
    own = [rank for rank in first if rank in known][:SHOWN]
    places: dict[python_stacks.Place, list[int]] = {}
    for rank, stack in known.items():
        if rank not in own:
            places.setdefault(python_stacks.place(stack), []).append(rank)
    lines = [f"rank {rank} is in {python_stacks.words_of(known[rank])}" for rank in own]
    for ranks in sorted(places.values(), key=len)[:SHOWN]:
        verb = "is" if len(ranks) == 1 else "are"
        lines.append(f"{ranks_words(ranks)} {verb} in {python_stacks.words_of(known[ranks[0]])}")
    if len(places) > SHOWN:
        lines.append(f"and {len(places) - SHOWN} more places")
    return lines


def _row(name: str, words: str) -> str:
    return f"{name:<{WIDTH}}{words}"


def _who(diagnosis: Diagnosis, scene: Scene, decided: str) -> str:
    if not diagnosis.ranks:
        return "no culprit"
    hosts = sorted({host for rank in diagnosis.ranks if (host := scene.host(rank))})
    where = f" on {', '.join(hosts[:SHOWN])}" if hosts else ""
    if diagnosis.hosts and decided:
        return f"{ranks_words(diagnosis.ranks)}{where}"
    if diagnosis.hosts:
        leave = "leave the host out"
    elif diagnosis.scope == "user":
        leave = "the program; no host is to blame"
    else:
        leave = "not sure enough, or too little known, to leave a host out"
    return f"{ranks_words(diagnosis.ranks)}{where} ({leave})"


def waiting_words(waiting: Waiting) -> str:
    parts = [f"{len(waiting.entered)} of {waiting.size} ranks are in"]
    if waiting.missing:
        parts.append(f"without {ranks_words(waiting.missing)}")
    if waiting.unknown:
        parts.append(f"of {ranks_words(waiting.unknown)} nothing is known")
    where = f"{waiting.desc} (group {waiting.group}), operation {waiting.seq}: {waiting.op}"
    return f"{where}; {', '.join(parts)}"


def _seen(diagnosis: Diagnosis, scene: Scene) -> str:
    many = len(scene.dumps)
    seen = [f"dumps of {many} rank{'s' if many != 1 else ''}"]
    seen.append(f"stacks of {sum(bool(facts.stack) for facts in scene.facts.values())}")
    if diagnosis.no_dump:
        seen.append(f"no dump of {ranks_words(diagnosis.no_dump)}")
    return ", ".join(seen) + f"; {diagnosis.num_waiting} ranks wait"
