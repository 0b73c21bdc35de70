"""A diagnosis as a person on call wants it: who, how sure, how it is known, what to do."""

from collections.abc import Iterator, Sequence

from orchestrator.diagnosis.facts import Diagnosis, Scene, Waiting

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


def diagnosis_text(diagnosis: Diagnosis, scene: Scene, attempt: int | None = None) -> str:
    """`attempt`: of the job, where it is one of a job of ours."""
    of_job = [] if attempt is None else [_row("attempt", str(attempt))]
    return "\n".join([*of_job, *_lines(diagnosis, scene)])


def _lines(diagnosis: Diagnosis, scene: Scene) -> Iterator[str]:
    yield _row("verdict", f"{diagnosis.kind}: {diagnosis.cause}")
    yield _row("who", _who(diagnosis, scene))
    yield _row("confidence", f"{diagnosis.confidence:.0%}")
    for sign in diagnosis.evidence:
        yield _row("because", sign)
    for waiting in diagnosis.waiting:
        yield _row("waiting", waiting_words(waiting))
    yield _row("evidence", _seen(diagnosis, scene))
    for title, files in (("unreadable", scene.unreadable), ("passed over", scene.passed_over)):
        for name, why in list(files.items())[:SHOWN]:
            yield _row(title, f"{name}: {why}")
        if len(files) > SHOWN:
            yield _row("", f"and {len(files) - SHOWN} more files: --json names them")
    if diagnosis.advice:
        yield _row("do", diagnosis.advice)


def _row(name: str, words: str) -> str:
    return f"{name:<{WIDTH}}{words}"


def _who(diagnosis: Diagnosis, scene: Scene) -> str:
    if not diagnosis.ranks:
        return "nobody is blamed"
    hosts = sorted({host for rank in diagnosis.ranks if (host := scene.host(rank))})
    where = f" on {', '.join(hosts[:SHOWN])}" if hosts else ""
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
    seen = [f"dumps of {len(scene.dumps)} ranks"]
    stacks = sum(bool(facts.stack) for facts in scene.facts.values())
    seen.append(f"stacks of {stacks}")
    if diagnosis.no_dump:
        seen.append(f"no dump of {ranks_words(diagnosis.no_dump)}")
    return ", ".join(seen) + f"; {diagnosis.num_waiting} ranks wait"
