"""Reads a YAML file that a user wrote as plain values, each with its place in the file.

YAML is read by the core schema of YAML 1.2: `3e-4` is a number, `yes` is a string and `010` is 10.
A key may occur only once, and anchors are refused, so that each value has one place. The contract's
codec interprets the values.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from orchestrator.contract.codec import Invalid, Problem, decode, join, nearest
from orchestrator.errors import NdctlError, SpecError

T = TypeVar("T")

# The C version is faster but may be missing; mypy cannot follow either name.
_CLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

CORE_SCHEMA: Sequence[tuple[str, str, str]] = (
    ("tag:yaml.org,2002:null", r"(~|null|Null|NULL|)", "~nN"),
    ("tag:yaml.org,2002:bool", r"(true|True|TRUE|false|False|FALSE)", "tTfF"),
    ("tag:yaml.org,2002:int", r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))",
        "-+.0123456789",
    ),
)
"""Tag, pattern and first characters of plain scalars that are not strings (YAML 1.2.2, 10.3)."""


class _Loader(_CLoader):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 -- yaml's own protocol


class Dumper(_CDumper):  # type: ignore[misc]
    """Quotes every string that some version of YAML would read as another type, and writes text of
    several lines in block style."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: Any, value: str) -> Any:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


Dumper.add_representer(str, _text)

for _tag, _pattern, _first in CORE_SCHEMA:
    for _class in (_Loader, Dumper):
        # "" is the first character of an empty scalar, which is null.
        _starts = ["", *_first] if _tag.endswith("null") else list(_first)
        _class.add_implicit_resolver(_tag, re.compile(rf"^{_pattern}$"), _starts)
# kubectl reads these as truth values and numbers too (`y`, `0X1f`, `0_9`, `2e_3`), and PyYAML does
# not.
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:bool", r"[yYnN]", "yYnN"),
    ("tag:yaml.org,2002:int", r"[-+]?(0_?[xXoO][0-9a-fA-F_]+|[0-9_]+)", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?[0-9_.]+[eE][-+0-9_]+", "-+.0123456789"),
):
    Dumper.add_implicit_resolver(_tag, re.compile(rf"^{_pattern}$"), list(_first))

SCALARS: Mapping[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:null": lambda text: None,
    "tag:yaml.org,2002:bool": lambda text: text.lower() == "true",
    "tag:yaml.org,2002:int": lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
    "tag:yaml.org,2002:float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
    "tag:yaml.org,2002:str": str,
}

SYNTAX_FIXES = (
    (r"\btab\b", "indent with spaces; YAML does not allow tabs"),
    (r"mapping values are not allowed", "quote a value that contains ': ', and check the indent"),
    (r"single document", "keep one document: remove everything from the line --- on"),
    (r"\$\{", 'inside { } or [ ] quote a value with variables: "${VAR}"'),
    (r"undefined alias|anchor|alias", "quote a value that begins with * or &"),
    (r"constructor for the tag", "write the value itself: Kubernetes has no tags such as !Ref"),
    (r"special characters|control|surrogate", "remove that character and save as UTF-8 text"),
)
OTHER_SYNTAX_FIX = (
    "check indent, commas and closing quotes there; quote a value with { } [ ] , # * &"
)


def read_text(path: Path, examples: str) -> str:
    """Content of the file `path`. `examples` is part of the fix if the file does not exist.

    Raises:
        SpecError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows write a mark in front
    except FileNotFoundError:
        if str(path) == "-":
            message = "-: no such file"
            raise SpecError(message, fix="give /dev/stdin for standard input") from None
        there = sorted(one.name for one in path.parent.glob("*.y*ml"))
        stems = {Path(one).stem: one for one in there}  # all end alike
        if (near := nearest(path.stem, stems)) is not None:
            fix = f"did you mean {path.parent / stems[near]}?"
        else:
            names = ", ".join(str(path.parent / one) for one in there[:5])
            fix = f"files there: {names}" if there else f"check the path; {examples}"
        raise SpecError(f"{path}: no such file", fix=fix) from None
    except UnicodeDecodeError as exc:
        message = f"{path}: must be UTF-8 text, but byte {exc.start} is not"
        raise SpecError(message, fix="save the file as UTF-8") from exc
    except OSError as exc:
        message = f"{path}: cannot be read: {exc.strerror}"
        raise SpecError(message, fix="give a readable YAML file") from exc


Advise = Callable[[Sequence[Problem]], Sequence[Problem]]
"""Improves the fixes of problems of one document."""


def decode_document(cls: type[T], document: "Document", advise: Advise | None = None) -> T:
    """`document` as a `cls`. `advise`: called if there are problems.

    Raises:
        SpecError: with all problems of the text and its values, each with its place. Its cause is
            an `Invalid` with the same problems as values.
    """
    value: T | None = None
    try:
        value = _decode(cls, document)
    except Invalid as exc:
        told = {problem.path for _, problem in document.problems}
        for problem in exc.problems if advise is None else advise(exc.problems):
            if problem.path not in told:
                document.report(problem)
    if value is None or document.problems:
        raise spec_error(document.source, document.problems)
    return value


def _decode(cls: type[T], document: "Document") -> T:
    try:
        return decode(cls, document.data)
    except Invalid as exc:
        # A variable's value was read as YAML, so `7` is a number. These keys take text.
        wanted = {one.path for one in exc.problems if "a string" in one.limit}
        if not (wanted := wanted & document.texts.keys()):
            raise
        for container, key, text in (document.texts.pop(path) for path in wanted):
            container[key] = text
        return decode(cls, document.data)


def scalar_of(text: str) -> Any:
    """`text` as YAML reads a plain value: a number, true, false, null, or a string."""
    for tag, pattern, _ in CORE_SCHEMA:
        if re.fullmatch(pattern, text):
            try:
                return SCALARS[tag](text)
            except ValueError:  # a number of thousands of digits
                return text
    return text


class Place(str):
    """`file:line`, as messages have it; programs also read the column, from 1."""

    file: str
    line: int
    column: int

    def __new__(cls, file: str, line: int, column: int = 1) -> "Place":
        place = super().__new__(cls, f"{file}:{line}")
        place.file, place.line, place.column = file, line, column
        return place


def _place_of(source: str, mark: Any) -> Place:
    """`mark`: of the C version or not, which have no type in common."""
    return Place(source, mark.line + 1, mark.column + 1)


@dataclass
class Document:
    """Data of a spec, and where each of its values came from."""

    source: str
    data: Any = None
    places: dict[str, str] = field(default_factory=dict)
    """Path -> `Place`, or where else the value came from."""
    overridden: dict[str, str] = field(default_factory=dict)
    """Path -> the option that gave its value, the last one last."""
    problems: list[tuple[str, Problem]] = field(default_factory=list)
    texts: dict[str, tuple[Any, Any, str]] = field(default_factory=dict)
    """Path -> container, key and text of each value that came from variables."""

    from_user: dict[str, str] = field(default_factory=dict)
    """Path -> place of each value from the user's settings."""

    def is_overridden(self, path: str) -> bool:
        """Whether an option gives the value at `path`."""
        return any(
            path == changed or path.startswith((f"{changed}.", f"{changed}["))
            for changed in self.overridden
        )

    def report(self, problem: Problem) -> None:
        self.problems.append((self.place_of(problem.path), problem))

    def place_of(self, path: str) -> str:
        """Where `path` was given; for a missing key, where the nearest existing key above it
        was."""
        for changed, option in reversed(self.overridden.items()):
            if path == changed or path.startswith((f"{changed}.", f"{changed}[")):
                return f"{option} {changed}"
        above = path
        while above not in self.places:
            made = [changed for changed in self.overridden if changed.startswith(f"{above}.")]
            if made:
                return f"{self.overridden[made[-1]]} {made[-1]}"
            above = above[: max(above.rfind("."), above.rfind("["), 0)]
        return self.places[above]


MOST_DEPTH = 64
"""Lists and mappings inside each other."""


def parse(text: str, source: str) -> Document:
    """The values of `text` and their lines."""
    document = Document(source)
    with syntax_errors(text, source):
        refuse_deep(text, source)
        aliases = _aliases(text, source)
        node = yaml.compose(text, Loader=_Loader)
    if node is not None:
        document.data = _Reader(document, aliases).read(node, "")
    return document


@contextlib.contextmanager
def syntax_errors(text: str, source: str) -> Iterator[None]:
    """Raises errors of a YAML reader as SpecErrors, with line and column."""
    try:
        yield
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line, column = (mark.line, mark.column) if mark else (0, 0)
        place = Place(source, line + 1, column + 1)
        raise _syntax_error(text, place, f"{place}:{column + 1}", exc) from exc
    except (yaml.YAMLError, UnicodeEncodeError) as exc:
        found = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]", text)
        place = Place(source, text.count("\n", 0, found.start()) + 1 if found else 1)
        raise _syntax_error(text, place, place, exc) from exc


def _aliases(text: str, source: str) -> list[Place]:
    """Where aliases are, from top to bottom. The nodes of aliases have the place of the anchor."""
    events = yaml.parse(text, Loader=_Loader)
    return [
        _place_of(source, event.start_mark)
        for event in events
        if isinstance(event, yaml.AliasEvent)
    ]


def refuse_deep(text: str, source: str) -> None:
    """Raises SpecError. libyaml is recursive, so a text of ten thousand brackets would crash the
    process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            place = Place(source, event.start_mark.line + 1 if event.start_mark else 1)
            limit, fix = f"nested at most {MOST_DEPTH} deep", "close every bracket"
            raise SpecError(
                f"{place}: lists and mappings are nested more than {MOST_DEPTH} deep",
                fix=fix,
                placed=[(place, Problem(path="", limit=limit, fix=fix))],
            )


def _syntax_error(text: str, place: Place, shown_place: str, exc: Exception) -> SpecError:
    line = place.line - 1
    said = " ".join(
        part for part in (getattr(exc, "context", None), getattr(exc, "problem", None)) if part
    )
    said = said or getattr(exc, "reason", None) or str(exc)
    lines = text.splitlines()
    shown = f", at {lines[line].rstrip()!r}" if line < len(lines) else ", at the end of the file"
    if line < len(lines) and "\t" in lines[line][: len(lines[line]) - len(lines[line].lstrip())]:
        said = f"{said} (a tab)"
    fixes = (fix for pattern, fix in SYNTAX_FIXES if re.search(pattern, said + shown))
    fix = next(fixes, OTHER_SYNTAX_FIX)
    problem = Problem(path="", limit=f"YAML: {said}", fix=fix)
    return SpecError(f"{shown_place}: not YAML: {said}{shown}", fix=fix, placed=[(place, problem)])


@dataclass
class _Reader:
    """Walks the nodes of one document."""

    document: Document
    aliases: Sequence[Place]
    seen: set[int] = field(default_factory=set)
    reached: tuple[int, int] = (0, 0)
    """Line and column of the last key or value."""

    def read(self, node: yaml.Node, path: str) -> Any:
        self.document.places[path] = self._reach(_place_of(self.document.source, node.start_mark))
        if id(node) in self.seen:
            after = (one for one in self.aliases if (one.line, one.column) > self.reached)
            self.document.places[path] = self._reach(next(after))
            limit, fix = "written out, without an alias", "repeat the value here"
            self.document.report(Problem(path=path, limit=limit, fix=fix))
            return None
        self.seen.add(id(node))
        match node:
            case yaml.MappingNode():
                return self._mapping(node, path)
            case yaml.SequenceNode():
                return [self.read(item, f"{path}[{i}]") for i, item in enumerate(node.value)]
            case _:
                return self._scalar(node, path)

    def _reach(self, place: Place) -> Place:
        self.reached = max(self.reached, (place.line, place.column))
        return place

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            where = join(path, key) if isinstance(key, str) else path
            line = self._reach(_place_of(self.document.source, key_node.start_mark))
            if not isinstance(key, str):
                fix = "quote a value that begins with { or ["
                problem = Problem(path=path, limit="plain keys with values", fix=fix)
                self.document.problems.append((line, problem))
            elif key in data:
                before = self.document.places[where]
                fix = f"keep this one or the one at {before}"
                words = "given a second time"
                problem = Problem(path=where, limit="given once", fix=fix, words=words)
                self.document.problems.append((line, problem))
            else:
                data[key] = self.read(value_node, where)
                self.document.places[where] = line
        return data

    def _scalar(self, node: yaml.Node, path: str) -> Any:
        try:
            return SCALARS[node.tag](node.value)
        except (KeyError, ValueError):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            limit = f"what its tag says ({tag})" if node.tag in SCALARS else "without a tag"
            fix = f"remove {tag} and keep only the value"
            if len(node.value) > sys.get_int_max_str_digits() > 0 and tag == "!!int":
                limit = f"a number of at most {sys.get_int_max_str_digits():,} digits"
                fix = "write a smaller number"
            self.document.report(Problem(path=path, value=node.value, limit=limit, fix=fix))
            return None


def spec_error(
    source: str, problems: Sequence[tuple[str, Problem]], also: Sequence[NdctlError] = ()
) -> SpecError:
    """All problems in one, each with its place, from top to bottom; those in `also` have none."""
    problems = _by_line(problems)
    lines = _lines(problems, also)
    if len(lines) > 1:
        lines = [f"{source} has {len(lines)} problems", *lines]
    error = SpecError("\n".join(lines), placed=problems, also=also)
    error.__cause__ = Invalid(problem for _, problem in problems)
    return error


LINE = re.compile(r"(?P<file>.*?):(?P<line>\d+)(:\d+)?")


def _by_line(problems: Sequence[tuple[str, Problem]]) -> list[tuple[str, Problem]]:
    """In the order of the lines of each file. The codec reports a mapping's values by kind."""
    files: dict[str, int] = {}

    def key(one: tuple[str, Problem]) -> tuple[int, int]:
        found = LINE.fullmatch(one[0])
        file, line = (found["file"], int(found["line"])) if found else ("", 0)
        return files.setdefault(file, len(files)), line

    return sorted(problems, key=key)


def texts_of(error: NdctlError) -> list[str]:
    """The text of each problem in `error`."""
    if isinstance(error, SpecError) and len(error.placed) + len(error.also) > 1:
        return _lines(error.placed, error.also)
    return [str(error)]


def _lines(problems: Sequence[tuple[str, Problem]], also: Sequence[NdctlError]) -> list[str]:
    return [*(_line(place, problem) for place, problem in problems), *map(str, also)]


def _line(place: str, problem: Problem) -> str:
    return f"{lead(place, problem.path)}{problem}"


def lead(place: str, path: str) -> str:
    """What stands before a message about the value at `path`, which names `path` itself."""
    option, _, given = place.partition(" ")
    return f"{option} " if option.startswith("--") and given == path else f"{place}: "
