"""Slurm's short form of host names: `n[001-128,130],gpu-[1-2]-[1-8]`."""

import itertools
import re
from collections.abc import Iterable, Iterator

from orchestrator.contract.codec import Invalid, Problem
from orchestrator.inventory.hosts import natural

LIMIT = 1_000_000
"""Largest number of names in a list. Slurm itself allows 64 K in one pair of brackets."""
LONGEST = 18
"""Largest number of digits in a range. Python refuses to read a number of thousands of digits."""
BRACKETS = re.compile(r"\[([^][]*)\]")
LAST_NUMBER = re.compile(r"^(.*?)(\d+)$")
EXAMPLE = "for example n[001-128,130]"


def expand(text: str) -> tuple[str, ...]:
    """The names in `text`, in order; empty for `(null)` or an empty text.

    Raises Invalid with the place that cannot be read.
    """
    if text.strip() in ("", "(null)", "None"):
        return ()
    names = itertools.chain.from_iterable(_names(part) for part in _parts(text.strip()))
    found = tuple(itertools.islice(names, LIMIT + 1))
    if len(found) > LIMIT:
        raise _unclear(text, f"at most {LIMIT:,} names")
    return found


def _parts(text: str) -> Iterator[str]:
    """The parts between commas outside brackets."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _unclear(
                text, f"written with matching brackets; they do not match at {text[at:]!r}"
            )
        if letter == "," and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise _unclear(text, "written with a closing bracket for each opening one")
    yield text[start:]


def _names(part: str) -> Iterator[str]:
    if "[" not in part:
        if part:
            yield part
        return
    pieces = BRACKETS.split(part)  # alternates between text and the inside of brackets
    choices: list[tuple[str, ...]] = []
    number = 1
    for at, piece in enumerate(pieces):
        choices.append(tuple(_numbers(piece, part)) if at % 2 else (piece,))
        number *= len(choices[-1])
        # `product` stores what is inside each pair of brackets, so too many are refused before.
        if number > LIMIT:
            raise _unclear(part, f"at most {LIMIT:,} names")
    yield from map("".join, itertools.product(*choices))


def _numbers(inside: str, part: str) -> Iterator[str]:
    """`001-003,7` gives 001, 002, 003 and 7."""
    for one in inside.split(","):
        first, dash, last = one.partition("-")
        if not (one.isascii() and first.isdigit() and (last.isdigit() or not dash)):
            raise _unclear(part, f"numbers and ranges of numbers in brackets, not {one!r}")
        if max(len(first), len(last)) > LONGEST:
            raise _unclear(part, f"numbers of at most {LONGEST} digits in brackets, not {one!r}")
        if not dash:
            yield one
            continue
        low, high = int(first), int(last)
        if not low <= high < low + LIMIT:
            raise _unclear(part, f"an ascending range of less than {LIMIT:,} names, not {one!r}")
        yield from (f"{number:0{len(first)}}" for number in range(low, high + 1))


def _unclear(text: str, limit: str) -> Invalid:
    return Invalid([Problem(path="hostlist", value=text, limit=limit, fix=EXAMPLE)])


def fold(names: Iterable[str]) -> str:
    """`names` in the short form that Slurm's commands accept, in natural order.

    They accept only a comma after a bracket, so `cn01a` and `cn02a` are not combined.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for name in sorted(set(names), key=natural):
        found = LAST_NUMBER.match(name)
        if found is None:
            groups[(name, -1)] = []
            continue
        head, digits = found.groups()
        # 08 and 8 are two names, and 10 goes with either: only a leading zero fixes the width.
        padded = (head, len(digits))
        leads = len(digits) > 1 and digits.startswith("0")
        key = padded if leads or padded in groups else (head, 0)
        groups.setdefault(key, []).append(int(digits))
    return ",".join(_folded(*key, numbers) for key, numbers in groups.items())


def _folded(head: str, width: int, numbers: list[int]) -> str:
    if not numbers:
        return head
    runs = [
        [number for _, number in run]
        for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    said = [
        f"{run[0]:0{width}}" if len(run) == 1 else f"{run[0]:0{width}}-{run[-1]:0{width}}"
        for run in runs
    ]
    if len(numbers) == 1:
        return f"{head}{said[0]}"
    return f"{head}[{','.join(said)}]"
