"""Patterns for foreign text, in an engine whose time grows linearly with the text (RE2).

Python's own `re` backtracks: a pattern such as `mlx5_\\w+.*(a|b)` can take minutes on 2 kB of text,
and blocks the whole process meanwhile. Code that reads a log or kernel messages compiles its
patterns here, or uses a pattern that obviously cannot backtrack.
"""

import logging
import re
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    import re2

log = logging.getLogger(__name__)

MOST_LINES = 400
MOST_BYTES = 65_536
"""Only the end of a text, up to these limits, is searched."""
LINE_BEGINS = 1_000
LINE_ENDS = 300
"""Numbers of characters at both ends of a line that are searched. The middle is dropped."""
CUT = " … "
LARGEST = 1_000
"""Largest number of instructions of a user's pattern. Larger ones are slow even in RE2."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
_OUTER = re.compile(
    r"\s*(?:\[(?:rank|default|Rank|RANK )\d+\]:? ?"  # PyTorch, torchrun
    r"|\((?:[\w=]{1,40} ){0,3}pid=\d{1,9}(?:, ip=[\d.]{7,15})?\) ?"  # Ray, vLLM
    r"|\d{1,6}: "  # srun --label
    r"|\[[\w.,: -]{1,60}\]<std(?:out|err|diag)>: ?"  # mpirun --tag-output
    r"|\[pod/[\w./-]{1,200}\] "  # kubectl logs --prefix
    r"|\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )?"  # Kubernetes
    r"|(?:ERROR|CRITICAL) \d\d-\d\d [\d:]{8} \[?[\w./]{1,60}:\d{1,5}\] )+"  # vLLM
)
"""Prefixes that launchers write before a line of a process."""
_AT_THE_MARGIN = re.compile(
    r"(.{1,80}?)(?:\[(?:rank|default)\d+\]:? ?)?"
    r'(?:Traceback \(most recent call last\):\s*$|  File "[^"]{1,300}", line \d+, in )'
)
"""Lines that a process prints at the margin, or two columns from it."""
_PART_OF_IT = ("Original ", "Exception ignored", "Exception in thread")
MOST_PREFIXES = 4
"""Largest number of prefix shapes in one text."""
TOO_LARGE = (
    f"a pattern of at most {LARGEST:,} instructions",
    "write .* for a counted repetition such as .{0,200}, or split it into two patterns",
)
FIXES = (
    ("(?=", "a look-ahead is not supported: match the words themselves"),
    ("(?!", "a look-ahead is not supported: put what a line must not contain under unless"),
    ("(?<", "a look-behind is not supported: match the words themselves"),
    ("(?>", "an atomic group is not needed: write (?:…)"),
    ("\\Z", "write \\z or $"),
)
BACKREFERENCE = re.compile(r"\\[1-9]|\(\?P=")


class Text(Struct, frozen=True):
    """The limited end of a text, in which patterns are searched line by line."""

    lines: tuple[str, ...]
    """Lines as they are shown."""
    data: bytes
    """Text that is searched: the same lines, without the prefixes of a launcher."""
    starts: tuple[int, ...]

    @classmethod
    def of(cls, lines: Iterable[str]) -> "Text":
        kept = bounded(lines)
        return _text(kept, [line.encode(errors="replace") for line in _bare(kept)])

    def pick(self, numbers: Iterable[int]) -> "Text":
        """Only these lines."""
        chosen = tuple(numbers)
        return _text(tuple(self.lines[n] for n in chosen), [self.line(n) for n in chosen])

    def without(self, numbers: Container[int]) -> "Text":
        return self.pick(n for n in range(len(self.lines)) if n not in numbers)

    def rewritten(self, changes: Mapping[int, tuple[str, bytes]]) -> "Text":
        """The text with some lines replaced: each as it is shown and as it is searched."""
        numbers = range(len(self.lines))
        lines = tuple(changes[n][0] if n in changes else self.lines[n] for n in numbers)
        return _text(lines, [changes[n][1] if n in changes else self.line(n) for n in numbers])

    def cut_before(self, patterns: tuple[str, ...]) -> "Text":
        """Each line only up to the first match in it."""
        regex = compiled(patterns)
        changes = {}
        for number in self.numbers(patterns):
            found = regex.search(self.line(number))
            assert found is not None
            changes[number] = (self.lines[number], self.line(number)[: found.start()])
        return self.rewritten(changes) if changes else self

    def followed_by(self, other: "Text") -> "Text":
        both = [*map(self.line, range(len(self.lines))), *map(other.line, range(len(other.lines)))]
        return _text((*self.lines, *other.lines), both)

    def since(self, number: int) -> "Text":
        """The lines from `number` on; -3: the last three."""
        return self.pick(range(len(self.lines))[number:])

    def numbers(self, patterns: tuple[str, ...]) -> Iterator[int]:
        """Numbers of the lines that match one of the patterns, ascending."""
        regex = compiled(patterns)
        at = 0
        while self.lines and (found := regex.search(self.data, at)):
            number = bisect_right(self.starts, found.start()) - 1
            yield number
            if number + 1 == len(self.starts):
                return
            at = self.starts[number + 1]

    def first(self, patterns: tuple[str, ...]) -> int:
        """The first matching line; if there is none, the number after the last line."""
        return next(self.numbers(patterns), len(self.lines))

    def has(self, patterns: tuple[str, ...]) -> bool:
        return self.first(patterns) < len(self.lines)

    def line(self, number: int) -> bytes:
        """A line as it is searched."""
        end = self.starts[number + 1] - 1 if number + 1 < len(self.starts) else len(self.data)
        return self.data[self.starts[number] : end]


def _bare(lines: Sequence[str]) -> Iterator[str]:
    """The lines without prefixes: the known ones, and those that this text shows.

    A traceback begins at the margin, so text before it is a prefix, which also stands before the
    other lines of the process: `[1,0]<stderr>:`, `worker-3: `, a time.
    """
    known = [_without_known(line) for line in lines]
    shapes: dict[str, re.Pattern[str]] = {}
    for line in known:
        if len(shapes) == MOST_PREFIXES:
            break
        if not ("Traceback (most" in line or '  File "' in line):
            continue
        begin = _AT_THE_MARGIN.match(line)
        if begin and begin[1].strip() and not begin[1].startswith(_PART_OF_IT):
            shape = "[0-9]+".join(map(re.escape, re.split(r"[0-9]+", begin[1])))
            shapes.setdefault(shape, re.compile(shape))
    return (_without_prefix(line, shapes.values()) for line in known) if shapes else iter(known)


def _without_known(line: str) -> str:
    return line[outer.end() :] if (outer := _OUTER.match(line)) else line


def _without_prefix(line: str, shapes: Iterable[re.Pattern[str]]) -> str:
    found = next((found for shape in shapes if (found := shape.match(line))), None)
    return _without_known(line[found.end() :]) if found else line


def _text(lines: tuple[str, ...], pieces: Sequence[bytes]) -> Text:
    starts, at = [], 0
    for piece in pieces:
        starts.append(at)
        at += len(piece) + 1
    return Text(lines, b"\n".join(pieces), tuple(starts))


def bounded(lines: Iterable[str]) -> tuple[str, ...]:
    """The last lines, without colours; the middle of long lines is cut out."""
    kept: list[str] = []
    size = 0
    for line in reversed(tuple(lines)):
        short = cut(line)
        size += len(short.encode(errors="replace")) + 1
        if size > MOST_BYTES or len(kept) == MOST_LINES:
            break
        kept.append(short)
    return tuple(reversed(kept))


def pieces(lines: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """As many lines at once as a `Text` holds without dropping one. Empty lines are left out."""
    piece: list[str] = []
    size = 0
    for line in filter(str.strip, lines):
        short = cut(line)
        # In bytes: a character of a broken encoding takes three of them.
        more = len(short.encode(errors="replace")) + 1
        if size + more > MOST_BYTES or len(piece) == MOST_LINES:
            yield tuple(piece)
            piece, size = [], 0
        piece.append(short)
        size += more
    if piece:
        yield tuple(piece)


def cut(line: str, most: int = LINE_BEGINS + LINE_ENDS) -> str:
    """A line without colours, and without its middle if it is longer than `most` characters."""
    if len(line) > 4 * most:  # do not search megabytes for colours
        line = f"{line[: 2 * most]}{CUT}{line[-most:]}"
    line = _ESCAPES.sub("", line).replace("\n", " ")
    if len(line) <= most:
        return line
    ends = most * LINE_ENDS // (LINE_BEGINS + LINE_ENDS)
    return f"{line[: most - ends - len(CUT)]}{CUT}{line[-ends:]}"


@lru_cache(maxsize=4096)
def compiled(patterns: tuple[str, ...]) -> "re2._Regexp[str]":
    """A pattern that finds any of `patterns` within a line, case-insensitive.

    A pattern that the engine refuses, for example one that an older ndctl accepted, matches
    nothing.
    """
    try:
        return _compile("|".join(f"(?:{pattern})" for pattern in patterns))
    except ValueError:
        fine = []
        for pattern in patterns:
            if why := problem_of(pattern):
                log.warning("ignoring pattern %r: it must be %s", pattern, why[0])
            else:
                fine.append(f"(?:{pattern})")
        return _compile("|".join(fine) or NOTHING)


NOTHING = r"[^\s\S]"
"""Matches nothing."""


@lru_cache(maxsize=4096)
def which(patterns: tuple[str, ...], line: bytes) -> str:
    """The first pattern that matches the line."""
    return next((one for one in patterns if compiled((one,)).search(line)), "")


def problem_of(pattern: str) -> tuple[str, str] | None:
    """What the pattern must be, and how to change it; None: it can be used."""
    try:
        size = _compile(f"(?:{pattern})").programsize
    except ValueError as exc:
        if "too large" in str(exc) or "repetition size" in str(exc):
            return TOO_LARGE
        fix = next((words for sign, words in FIXES if sign in pattern), "")
        if not fix and BACKREFERENCE.search(pattern):
            fix = "a back-reference is not supported: match the words themselves"
        fix = fix or "see github.com/google/re2/wiki/Syntax; put \\ before ( ) [ ] { } . * + ? |"
        # RE2 quotes the pattern as it was compiled, not as the user wrote it.
        why = str(exc).partition(": (?m)")[0]
        return f"a regular expression of RE2 ({why})", fix
    return TOO_LARGE if size > LARGEST else None


def _compile(pattern: str) -> "re2._Regexp[str]":
    """Raises ValueError."""
    import re2  # imported only after a failure: most commands need no pattern

    try:
        return re2.compile(f"(?m){pattern}", _options())
    except re2.error as exc:
        said = exc.args[0] if exc.args else ""
        raise ValueError(said.decode() if isinstance(said, bytes) else str(said)) from None
    except UnicodeEncodeError:
        raise ValueError("it has characters that cannot be encoded") from None


@cache
def _options() -> Any:
    import re2

    options = re2.Options()
    options.case_sensitive = False
    options.never_nl = True  # a match must not extend over the end of its line
    options.log_errors = False
    return options
