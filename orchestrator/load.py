"""A YAML job spec, and what `--set` changes in it, to a JobSpec; every problem with its place.

YAML is read by the core schema of YAML 1.2: `3e-4` is a number, `yes` and `010` are what they look
like. Each key stands once and is written out, without anchors, so that a place can be named. What
the values mean is left to the contract's codec, not to pydantic: its import alone takes most of the
time that `ndctl plan` may (benchmarks/cli.py).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from orchestrator.contract.codec import Invalid, Problem, decode, encode, join, key_of
from orchestrator.contract.spec import JobSpec
from orchestrator.errors import SpecError

# Written in C where yaml was built with libyaml; one name for either, which mypy cannot follow.
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
"""Tag, pattern and first characters of the plain scalars that are no strings (YAML 1.2.2, 10.3)."""


class _Loader(_CLoader):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012 -- yaml's own protocol


class _Dumper(_CDumper):  # type: ignore[misc]
    """Quotes what either version of YAML would not read as a string."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        # "" is the first character of an empty scalar, which is null.
        _starts = ["", *_first] if _tag.endswith("null") else list(_first)
        _class.add_implicit_resolver(_tag, re.compile(rf"^{_pattern}$"), _starts)

SCALARS: Mapping[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:null": lambda text: None,
    "tag:yaml.org,2002:bool": lambda text: text.lower() == "true",
    "tag:yaml.org,2002:int": lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
    "tag:yaml.org,2002:float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
    "tag:yaml.org,2002:str": str,
}

SYNTAX_FIXES = (
    (r"\btab\b", "indent with spaces, YAML takes no tabs"),
    (r"mapping values are not allowed", "quote a value that has ': ' in it, and check the indent"),
    (r"single document", "keep one document: remove what follows the line ---"),
    (r"undefined alias|anchor|alias", "quote a value that begins with * or &"),
    (r"special characters|control|surrogate", "remove that character, save as UTF-8 text"),
)
OTHER_SYNTAX_FIX = (
    "check indent, commas and closing quotes there; quote a value with { } [ ] , # * &"
)


def read_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The spec in the file `path`.

    Raises:
        SpecError: the file cannot be read, or `load_spec` refuses it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(one) for one in path.parent.glob("*.y*ml"))
        fix = f"there are {', '.join(near[:5])}" if near else "check the path; examples/ has specs"
        raise SpecError(f"{path}: no such file", fix=fix) from None
    except UnicodeDecodeError as exc:
        message = f"{path}: must be UTF-8 text, byte {exc.start} is not"
        raise SpecError(message, fix="save the file as UTF-8") from exc
    except OSError as exc:
        message = f"{path}: cannot be read: {exc.strerror}"
        raise SpecError(message, fix="give a readable YAML file") from exc
    return load_spec(text, str(path), overrides)


def load_spec(text: str, source: str, overrides: Sequence[str] = ()) -> JobSpec:
    """The spec written in `text`, which is from `source`, with `a.b.c=VALUE` overrides on top.

    Raises:
        SpecError: with all problems, each with its place, value, limit and fix. The cause of it
            is an `Invalid` with the same problems as values.
    """
    document = _parse(text, source)
    if not isinstance(document.data, dict):
        empty = document.data is None
        limit = "a mapping of the keys of a job spec"
        problem = Problem(
            path="",
            value="an empty file" if empty else document.data,
            limit=limit,
            fix="begin with examples/quickstart.yaml",
        )
        raise _spec_error(source, [(f"{source}:1", problem)])
    _override(document, overrides)
    try:
        spec: JobSpec = decode(JobSpec, document.data)
    except Invalid as exc:
        told = {problem.path for _, problem in document.problems}
        for problem in exc.problems:
            if problem.path not in told:
                document.report(problem)
    if document.problems:
        raise _spec_error(source, document.problems)
    return spec


def dump_spec(spec: JobSpec) -> str:
    """`spec` as YAML with every default written out; `load_spec` reads it back as an equal spec."""
    text: str = yaml.dump(
        _without_absent(spec), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return text


def _without_absent(spec: Any) -> Any:
    """`spec` encoded, without the keys that are null because they were not given."""
    if not is_dataclass(spec):
        return encode(spec)
    given = {f: getattr(spec, f.name) for f in fields(spec)}
    return {
        key_of(f.name): _without_absent(value)
        for f, value in given.items()
        if not (value is None and f.default is None)
    }


@dataclass
class _Document:
    """Data on its way to a spec, and where each value of it came from."""

    source: str
    data: Any = None
    places: dict[str, str] = field(default_factory=dict)
    """Path -> `file:line`."""
    overridden: list[str] = field(default_factory=list)
    problems: list[tuple[str, Problem]] = field(default_factory=list)

    def report(self, problem: Problem) -> None:
        self.problems.append((self.place_of(problem.path), problem))

    def place_of(self, path: str) -> str:
        """Where `path` was given; of what was not given, where the nearest thing above it was."""
        for changed in reversed(self.overridden):
            if path == changed or path.startswith((f"{changed}.", f"{changed}[")):
                return f"--set {changed}"
        above = path
        while above not in self.places:
            made = [changed for changed in self.overridden if changed.startswith(f"{above}.")]
            if made:
                return f"--set {made[-1]}"
            above = above[: max(above.rfind("."), above.rfind("["), 0)]
        return self.places[above]


def _parse(text: str, source: str) -> _Document:
    """The values of `text` and their lines."""
    document = _Document(source)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line, column = (mark.line, mark.column) if mark else (0, 0)
        raise _syntax_error(text, f"{source}:{line + 1}:{column + 1}", line, exc) from exc
    except (yaml.YAMLError, UnicodeEncodeError) as exc:
        found = re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]", text)
        line = text.count("\n", 0, found.start()) if found else 0
        raise _syntax_error(text, f"{source}:{line + 1}", line, exc) from exc
    if node is not None:
        document.data = _Reader(document).read(node, "")
    return document


def _syntax_error(text: str, place: str, line: int, exc: Exception) -> SpecError:
    said = " ".join(
        part for part in (getattr(exc, "context", None), getattr(exc, "problem", None)) if part
    )
    said = said or getattr(exc, "reason", None) or str(exc)
    lines = text.splitlines()
    shown = f", at {lines[line].rstrip()!r}" if line < len(lines) else ", at the end of the file"
    if line < len(lines) and "\t" in lines[line][: len(lines[line]) - len(lines[line].lstrip())]:
        said = f"{said} (a tab)"
    fixes = (fix for pattern, fix in SYNTAX_FIXES if re.search(pattern, said))
    return SpecError(f"{place}: not YAML: {said}{shown}", fix=next(fixes, OTHER_SYNTAX_FIX))


@dataclass
class _Reader:
    """Walks the nodes of one document."""

    document: _Document
    seen: set[int] = field(default_factory=set)

    def read(self, node: yaml.Node, path: str) -> Any:
        self.document.places[path] = f"{self.document.source}:{node.start_mark.line + 1}"
        if id(node) in self.seen:
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

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            where = join(path, key) if isinstance(key, str) else path
            line = f"{self.document.source}:{key_node.start_mark.line + 1}"
            if not isinstance(key, str):
                fix = "quote a value that begins with { or ["
                problem = Problem(path=path, limit="plain keys with values", fix=fix)
                self.document.problems.append((line, problem))
            elif key in data:
                before = self.document.places[where]
                fix = f"keep this one or the one at {before}"
                problem = Problem(path=where, value="a second one", limit="given once", fix=fix)
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
            fix = f"remove {tag} and write the value alone"
            self.document.report(Problem(path=path, value=node.value, limit=limit, fix=fix))
            return None


def _override(document: _Document, overrides: Sequence[str]) -> None:
    """Put the values of `a.b.c=VALUE` into the document."""
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        keys = path.split(".")
        place = f"--set {override}"
        if not (equals and all(keys)):
            limit = "written KEY=VALUE"
            fix = "for example --set train.steps=100"
            document.problems.append((place, Problem(path=path, limit=limit, fix=fix)))
            continue
        try:
            value = _parse(text, place)
        except SpecError as exc:
            fix = f"quote the value: --set '{path}=\"…\"'"
            limit = f"a YAML value ({exc.message.rpartition('not YAML: ')[2]})"
            problem = Problem(path=path, value=text, limit=limit, fix=fix)
            document.problems.append((f"--set {path}", problem))
            continue
        document.problems += [
            (
                f"--set {path}",
                Problem(path=join(path, p.path), value=p.value, limit=p.limit, fix=p.fix),
            )
            for _, p in value.problems
        ]
        _put(document, keys, value.data)


def _put(document: _Document, keys: Sequence[str], value: Any) -> None:
    inside = document.data
    path = ".".join(keys)
    for depth, key in enumerate(keys[:-1], 1):
        if inside.get(key) is None:
            inside[key] = {}
        inside = inside[key]
        if not isinstance(inside, dict):
            above = ".".join(keys[:depth])
            limit = f"a key of a mapping, and {above} is a value of its own"
            problem = Problem(path=path, limit=limit, fix=f"set {above} itself: --set {above}=…")
            document.problems.append((f"--set {path}", problem))
            return
    inside[keys[-1]] = value
    document.overridden.append(path)


def _spec_error(source: str, problems: Sequence[tuple[str, Problem]]) -> SpecError:
    lines = [_line(place, problem) for place, problem in problems]
    if len(lines) > 1:
        lines = [f"{source} has {len(lines)} problems", *lines]
    error = SpecError("\n".join(lines))
    error.__cause__ = Invalid(problem for _, problem in problems)
    return error


def _line(place: str, problem: Problem) -> str:
    said = str(problem)
    if place == f"--set {problem.path}":
        return f"--set {said}"
    return f"{place}: {said}"
