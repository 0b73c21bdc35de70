"""Patterns over text that others wrote, by an engine whose time grows with the text alone (RE2).

Python's own `re` backtracks: a pattern such as `mlx5_\\w+.*(a|b)` takes minutes on 2 kB of an
unlucky text, in which nothing else of the process runs. What reads a log or a kernel's words
compiles its patterns here, or has a pattern that visibly cannot backtrack.
"""

import logging
import re
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import re2

log = logging.getLogger(__name__)

MOST_LINES = 400
MOST_BYTES = 65_536
"""Of the end of a text, together with `MOST_LINES`."""
LINE_BEGINS = 1_000
LINE_ENDS = 300
"""Characters of a line that are looked at: more than these tell nothing new."""
CUT = " … "
LARGEST = 1_000
"""Instructions of a user's pattern: what takes more would be slow for the engine as well."""
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
"""What others write before the line of a process."""
_AT_THE_MARGIN = re.compile(
    r"(.{1,80}?)(?:\[(?:rank|default)\d+\]:? ?)?"
    r'(?:Traceback \(most recent call last\):\s*$|  File "[^"]{1,300}", line \d+, in )'
)
"""What begins at the margin of a process's output, or two columns from it."""
_PART_OF_IT = ("Original ", "Exception ignored", "Exception in thread")
MOST_PREFIXES = 4
"""Shapes of prefixes that one text has."""
TOO_LARGE = (
    f"a pattern of at most {LARGEST:,} instructions",
    "write .* for a counted repetition such as .{0,200}, or make two patterns of it",
)
FIXES = (
    ("(?=", "a look-ahead is not supported: match the words themselves"),
    ("(?!", "a look-ahead is not supported: put what a line must not have under unless"),
    ("(?<", "a look-behind is not supported: match the words themselves"),
    ("(?>", "an atomic group is not needed: write (?:…)"),
    ("\\Z", "write \\z or $"),
)
BACKREFERENCE = re.compile(r"\\[1-9]|\(\?P=")


@dataclass(frozen=True, slots=True)
class Text:
    """The end of a text, bounded, in which patterns are looked for line by line."""

    lines: tuple[str, ...]
    """As they are shown."""
    data: bytes
    """What is searched: the same lines, without what a launcher wrote before them."""
    starts: tuple[int, ...]

    @classmethod
    def of(cls, lines: Iterable[str]) -> "Text":
        kept = bounded(lines)
        return _text(kept, [line.encode(errors="replace") for line in _bare(kept)])

    def pick(self, numbers: Iterable[int]) -> "Text":
        """Those lines alone."""
        chosen = tuple(numbers)
        return _text(tuple(self.lines[n] for n in chosen), [self.line(n) for n in chosen])

    def without(self, numbers: Container[int]) -> "Text":
        return self.pick(n for n in range(len(self.lines)) if n not in numbers)

    def rewritten(self, changes: Mapping[int, tuple[str, bytes]]) -> "Text":
        """With other lines in some places: each as it is shown and as it is searched."""
        numbers = range(len(self.lines))
        lines = tuple(changes[n][0] if n in changes else self.lines[n] for n in numbers)
        return _text(lines, [changes[n][1] if n in changes else self.line(n) for n in numbers])

    def cut_before(self, patterns: tuple[str, ...]) -> "Text":
        """Each line only up to where one of the patterns is found in it."""
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
        """From that line on; -3: the last three."""
        return self.pick(range(len(self.lines))[number:])

    def numbers(self, patterns: tuple[str, ...]) -> Iterator[int]:
        """The lines in which one of the patterns is found, from the first on."""
        regex = compiled(patterns)
        at = 0
        while self.lines and (found := regex.search(self.data, at)):
            number = bisect_right(self.starts, found.start()) - 1
            yield number
            if number + 1 == len(self.starts):
                return
            at = self.starts[number + 1]

    def first(self, patterns: tuple[str, ...]) -> int:
        """The first such line; where there is none, one beyond the last."""
        return next(self.numbers(patterns), len(self.lines))

    def has(self, patterns: tuple[str, ...]) -> bool:
        return self.first(patterns) < len(self.lines)

    def line(self, number: int) -> bytes:
        """As it is searched."""
        end = self.starts[number + 1] - 1 if number + 1 < len(self.starts) else len(self.data)
        return self.data[self.starts[number] : end]


def _bare(lines: Sequence[str]) -> Iterator[str]:
    """Without what others wrote before them: known prefixes, and those that this text shows.

    A traceback begins at the margin, so what stands before it is a prefix, and stands before the
    other lines of the process as well: `[1,0]<stderr>:`, `worker-3: `, a time.
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
    """The last of them, each without colours and cut in its middle where it is long."""
    kept: list[str] = []
    size = 0
    for line in reversed(tuple(lines)):
        short = cut(line)
        size += len(short.encode(errors="replace")) + 1
        if size > MOST_BYTES or len(kept) == MOST_LINES:
            break
        kept.append(short)
    return tuple(reversed(kept))


def cut(line: str, most: int = LINE_BEGINS + LINE_ENDS) -> str:
    """One line without colours; without its middle where it has more than `most` characters."""
    if len(line) > 4 * most:  # a line of megabytes is not searched for colours as a whole
        line = f"{line[: 2 * most]}{CUT}{line[-most:]}"
    line = _ESCAPES.sub("", line).replace("\n", " ")
    if len(line) <= most:
        return line
    ends = most * LINE_ENDS // (LINE_BEGINS + LINE_ENDS)
    return f"{line[: most - ends - len(CUT)]}{CUT}{line[-ends:]}"


@lru_cache(maxsize=4096)
def compiled(patterns: tuple[str, ...]) -> "re2._Regexp[str]":
    """One that finds any of them, in single lines and without regard to case.

    A pattern that the engine refuses, as one that an older ndctl took, finds nothing.
    """
    try:
        return _compile("|".join(f"(?:{pattern})" for pattern in patterns))
    except ValueError:
        fine = []
        for pattern in patterns:
            if why := problem_of(pattern):
                log.warning("the pattern %r finds nothing: it must be %s", pattern, why[0])
            else:
                fine.append(f"(?:{pattern})")
        return _compile("|".join(fine) or NOTHING)


NOTHING = r"[^\s\S]"
"""Is found nowhere."""


@lru_cache(maxsize=4096)
def which(patterns: tuple[str, ...], line: bytes) -> str:
    """The first of the patterns that is found in the line."""
    return next((one for one in patterns if compiled((one,)).search(line)), "")


def problem_of(pattern: str) -> tuple[str, str] | None:
    """What a pattern must be that this one is not, and how to change it; None: it can be used."""
    try:
        size = _compile(f"(?:{pattern})").programsize
    except ValueError as exc:
        if "too large" in str(exc) or "repetition size" in str(exc):
            return TOO_LARGE
        fix = next((words for sign, words in FIXES if sign in pattern), "")
        if not fix and BACKREFERENCE.search(pattern):
            fix = "a back-reference is not supported: match the words themselves"
        fix = fix or "see github.com/google/re2/wiki/Syntax; put \\ before ( ) [ ] { } . * + ? |"
        return f"a regular expression of RE2 ({exc})", fix
    return TOO_LARGE if size > LARGEST else None


def _compile(pattern: str) -> "re2._Regexp[str]":
    """Raises ValueError."""
    import re2  # only when something failed: most commands need no pattern

    try:
        return re2.compile(f"(?m){pattern}", _options())
    except re2.error as exc:
        said = exc.args[0] if exc.args else ""
        raise ValueError(said.decode() if isinstance(said, bytes) else str(said)) from None
    except UnicodeEncodeError:
        raise ValueError("it has characters that are no text") from None


@cache
def _options() -> Any:
    import re2

    options = re2.Options()
    options.case_sensitive = False
    options.never_nl = True  # no match goes beyond its line
    options.log_errors = False
    return options
