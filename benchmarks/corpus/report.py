"""The limits of a score, and its report."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.corpus.cases import is_kept
from benchmarks.corpus.score import Grade, Outcome

LEAST_RIGHT = 0.95
MOST_MISSED = 0.02
"""Of the hosts that are broken."""


def passes(outcomes: Sequence[Outcome]) -> bool:
    counts = Counter(one.grade for one in outcomes)
    broken = sum(one.broken for one in outcomes)
    return (
        counts[Grade.RIGHT] >= LEAST_RIGHT * len(outcomes)
        and not any(one.excluded for one in outcomes)
        and sum(one.missed for one in outcomes) <= MOST_MISSED * broken
    )


def report(title: str, outcomes: Sequence[Outcome], *, dumps: bool = False) -> Iterator[str]:
    counts = Counter(one.grade for one in outcomes)
    yield f"{title}: {len(outcomes)} cases"
    yield _row("right", counts[Grade.RIGHT], len(outcomes), f"at least {LEAST_RIGHT:.0%}")
    yield _row("generic", counts[Grade.GENERIC], len(outcomes))
    yield _row("wrong", counts[Grade.WRONG], len(outcomes))
    wrongly = sum(one.excluded for one in outcomes)
    if dumps:
        yield _row("healthy rank named", wrongly, len(outcomes), "0")
    else:
        broken, healthy = [sum(map(of, outcomes)) for of in (_broken, _healthy)]
        missed = sum(one.missed for one in outcomes)
        yield _row("broken host missed", missed, broken, f"at most {MOST_MISSED:.0%}")
        yield _row("healthy host excluded", wrongly, healthy, "0")
    yield f"  {'pass' if passes(outcomes) else 'FAIL'}"


def kept_half(outcomes: Iterable[Outcome]) -> str:
    """The score of the kept halves of rounds. It is news about the rules, not a limit for them."""
    kept = [one for one in outcomes if is_kept(one.name, one.file)]
    counts = Counter(one.grade for one in kept)
    missed, excluded = sum(one.missed for one in kept), sum(one.excluded for one in kept)
    return (
        f"  kept halves: {counts[Grade.RIGHT]} of {len(kept)} right,"
        f" {counts[Grade.GENERIC]} generic, {counts[Grade.WRONG]} wrong,"
        f" {missed} broken hosts missed, {excluded} healthy hosts excluded"
    )


def _broken(one: Outcome) -> bool:
    return one.broken


def _healthy(one: Outcome) -> bool:
    return one.healthy


def _row(what: str, count: int, of: int, limit: str = "") -> str:
    share = f"{count / of:6.1%}" if of else "     -"
    return f"  {what:<22}{count:5} of {of:4} {share}" + (f"   limit: {limit}" if limit else "")


def misses(outcomes: Iterable[Outcome]) -> Iterator[str]:
    for one in outcomes:
        if is_kept(one.name, one.file) or (
            one.grade is Grade.RIGHT and not (one.missed or one.excluded)
        ):
            continue
        hosts = " MISSED" * one.missed + " EXCLUDED" * one.excluded
        yield f"{one.file} {one.name}: {one.grade}{hosts}"
        yield f"    expected {one.expected}"
        yield f"    got      {one.got}"
        yield f"    line     {(one.line or '-')[:200]}"
