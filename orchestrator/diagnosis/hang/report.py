"""The text of `ndctl diagnose`: verdict, culprit, confidence, evidence and the next step."""

from collections.abc import Iterator, Sequence

from orchestrator.diagnosis.hang.evidence_index import SURE
from orchestrator.diagnosis.hang.verdicts import Diagnosis, HangEvidence, Waiting
from orchestrator.diagnosis.stacks import python_stacks

SHOWN = 8
WIDTH = 12


def ranks_wait(many: int) -> str:
    return "1 rank waits" if many == 1 else f"{many} ranks wait"


def ranks_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spans(ranks)}"


def spans(ranks: Sequence[int]) -> str:
    """`0-3, 7`; at most `SHOWN` spans, then a count of the remaining spans."""
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
    diagnosis: Diagnosis, scene: HangEvidence, attempt: int | None = None, decided: str = ""
) -> str:
    """The report.

    Args:
        attempt: attempt of the job; None if the dumps are not from a job of ndctl.
        decided: what ndctl did about it; empty if nothing.
    """
    of_job = [] if attempt is None else [_row("attempt", str(attempt))]
    return "\n".join([*of_job, *_lines(diagnosis, scene, decided)])


def _lines(diagnosis: Diagnosis, scene: HangEvidence, decided: str) -> Iterator[str]:
    # A rank whose dump was not copied looks like one that did not call, so it is only suspected.
    only_suspected = bool(diagnosis.ranks) and diagnosis.confidence < SURE
    yield _row("verdict", f"{'possibly ' * only_suspected}{diagnosis.kind}: {diagnosis.cause}")
    title = "suspect" if only_suspected else "culprit"
    yield _row(title, _culprit(diagnosis, scene, decided))
    if decided:
        yield _row("ndctl did", decided)
    yield _row("confidence", f"{diagnosis.confidence:.0%}")
    for sign in diagnosis.evidence:
        yield _row("evidence", sign)
    for waiting in diagnosis.waiting:
        yield _row("waiting", waiting_words(waiting))
    for line in where_words(scene, diagnosis.ranks):
        yield _row("stacks", line)
    yield _row("input", _input(diagnosis, scene))
    for title, files in (("unreadable", scene.unreadable), ("skipped", scene.passed_over)):
        for name, why in list(files.items())[:SHOWN]:
            yield _row(title, f"{name}: {why}")
        if len(files) > SHOWN:
            yield _row("", f"and {len(files) - SHOWN} more files: --json names them")
    if diagnosis.advice:
        yield _row("next", diagnosis.advice)


def where_words(scene: HangEvidence, first: Sequence[int]) -> list[str]:
    """Where ranks are in the program, from their stacks.

    The ranks of `first` have one line each. The others have one line per place, the place with the
    fewest ranks first, because a rank on its own is the likely culprit.
    """
    known = {
        rank: stack
        for rank, facts in sorted(scene.facts.items())
        if (stack := python_stacks.main_stack(facts.stack))
    }
    own = [rank for rank in first if rank in known][:SHOWN]
    places: dict[python_stacks.Place, list[int]] = {}
    for rank, stack in known.items():
        # A culprit has a line of its own already.
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


def _culprit(diagnosis: Diagnosis, scene: HangEvidence, decided: str) -> str:
    if not diagnosis.ranks:
        return "no culprit"
    hosts = sorted({host for rank in diagnosis.ranks if (host := scene.host(rank))})
    where = f" on {', '.join(hosts[:SHOWN])}" if hosts else ""
    # ndctl has acted on the verdict, and the report says what it did, so no advice about the host
    # follows.
    if diagnosis.hosts and decided:
        return f"{ranks_words(diagnosis.ranks)}{where}"
    if diagnosis.hosts:
        leave = "exclude the host"
    # The program fails on any host, so a replacement changes nothing.
    elif diagnosis.scope == "user":
        leave = "the program is wrong; do not exclude a host"
    else:
        leave = "the evidence is not sufficient to exclude a host"
    return f"{ranks_words(diagnosis.ranks)}{where} ({leave})"


def waiting_words(waiting: Waiting) -> str:
    size = "an unknown number of" if waiting.open else waiting.size
    parts = [f"{len(waiting.entered)} of {size} ranks entered it"]
    if waiting.missing:
        parts.append(f"missing: {ranks_words(waiting.missing)}")
    if waiting.unknown:
        parts.append(f"no dump: {ranks_words(waiting.unknown)}")
    where = f"{waiting.desc} (group {waiting.group}), operation {waiting.seq}: {waiting.op}"
    return f"{where}; {', '.join(parts)}"


def _input(diagnosis: Diagnosis, scene: HangEvidence) -> str:
    many = len(scene.dumps)
    seen = [f"dumps of {many} rank{'s' if many != 1 else ''}"]
    seen.append(f"stacks of {sum(bool(facts.stack) for facts in scene.facts.values())}")
    if diagnosis.no_dump:
        seen.append(f"no dump of {ranks_words(diagnosis.no_dump)}")
    waiting = diagnosis.num_waiting
    return ", ".join(seen) + f"; {waiting} rank{'s' if waiting != 1 else ''} waiting"
