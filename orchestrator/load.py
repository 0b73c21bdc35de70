"""Loads a YAML job spec, with overlays and `--set` overrides; every problem has its place.

The contract's codec interprets the values. pydantic is not used, because importing it takes most of
the time that `ndctl plan` may take (`python -m benchmarks.cli`).
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import yaml
from msgspec import Struct
from msgspec.structs import fields, replace

from orchestrator.contract.codec import Problem, encode, fields_of, join, key_of
from orchestrator.contract.files.env import has_user_config
from orchestrator.contract.spec.job_spec import KUBERNETES_NAME, CommonSpec, JobSpec, ScriptSpec
from orchestrator.contract.spec.kubernetes_spec import Kind, KubernetesSpec, too_long_name
from orchestrator.contract.spec.types import OVERLAY, SET
from orchestrator.diagnosis.logs.patterns import problem_of
from orchestrator.errors import NdctlError, SpecError
from orchestrator.yaml_document import (
    Document,
    Dumper,
    Place,
    decode_document,
    parse,
    read_text,
    spec_error,
)


class Written(Struct, frozen=True, kw_only=True):
    """A spec, and where in the file each of its values is."""

    spec: CommonSpec
    path: Path
    """Absolute path of the file; the current folder if there is none."""
    overrides: tuple[str, ...]
    document: Document

    @property
    def from_user(self) -> tuple[str, ...]:
        """A sentence about each value that came from the user's settings."""
        found = []
        for path, place in self.document.from_user.items():
            value: Any = self.document.data
            for key in path.split("."):
                value = value[key]
            found.append(f"{path}: {_shown(value)} is from {place}")
        return tuple(found)

    def refused(self, problems: Iterable[Problem], also: Sequence[NdctlError] = ()) -> SpecError:
        """An error with each problem and its place, and the errors in `also`."""
        placed = [(self.document.place_of(problem.path), problem) for problem in problems]
        return spec_error(self.document.source, placed, also)


def _shown(value: Any) -> str:
    """A value in few words; receivers of messages may be long."""
    if not isinstance(value, list):
        return str(value)
    plain = all(isinstance(one, str) for one in value)
    return ", ".join(value) if plain else f"a list of {len(value)}"


def read_spec(
    path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> CommonSpec:
    """The spec in the file `path`.

    Args:
        overrides: `KEY=VALUE` of `--set`, `--OPTION KEY=VALUE` of another option, and `-f FILE` of
            overlays.
        environ: names the user's settings, and has the values of `${VAR}`; None for a spec that
            ndctl wrote, which has all values.

    Raises:
        SpecError: the file cannot be read, or `load_spec` refuses it.
    """
    return read_written(path, overrides, environ).spec


def read_written(
    path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Written:
    """The spec with the places of its values."""
    return written_in(read_document(path, overrides, environ), path, overrides)


def read_document(
    path: Path, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> Document:
    """The values of the spec in the file `path`, which `written_in` checks."""
    text = read_text(path, "`ndctl init` writes a first spec")
    if path.suffix in OF_OTHERS or text.startswith(("#", "{")) or "\napiVersion:" in f"\n{text}":
        from orchestrator.specs.foreign.recognised import foreign_text

        if (told := foreign_text(text, path)) is not None:
            raise SpecError(f"{path}: {told[0]}", fix=told[1])
    return _document(text, str(path), overrides, environ)


def written_in(document: Document, path: Path, overrides: Sequence[str]) -> Written:
    """The spec in `document`, which was read from `path` with `overrides`."""
    spec = decode_document(_class_of(document), document, _advised)
    # The commands that are made of them later have no other option than --set.
    as_set = tuple(one if one.startswith(OVERLAY) else _option_of(one)[1] for one in overrides)
    return Written(spec=spec, path=path.absolute(), overrides=as_set, document=document)


def written_from(
    data: dict[str, Any],
    source: str,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Written:
    """The spec with the values `data`, which is in no file. `source` names it in messages.

    Raises:
        SpecError: as `load_spec`.
    """
    document = Document(source, deepcopy(data), places={"": source})
    _override(document, overrides)
    _use_settings(document, environ)
    _check_patterns(document)
    _check_name(document)
    spec = decode_document(_class_of(document), document, _advised)
    return Written(spec=spec, path=Path(), overrides=tuple(overrides), document=document)


def load_spec(
    text: str,
    source: str,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> CommonSpec:
    """The spec in `text`, as `read_spec` reads a file. `source` names the text in messages.

    Raises:
        SpecError: with all problems, each with its place, value, limit and fix. Its cause is an
            `Invalid` with the same problems as values.
    """
    document = _document(text, source, overrides, environ)
    return decode_document(_class_of(document), document, _advised)


def _document(
    text: str, source: str, overrides: Sequence[str], environ: Mapping[str, str] | None
) -> Document:
    document = parse(text, source)
    if not isinstance(document.data, dict):
        empty = document.data is None
        limit = "a mapping of the keys of a job spec"
        problem = Problem(
            path="",
            value="an empty file" if empty else document.data,
            limit=limit,
            fix="`ndctl init` writes a first spec",
        )
        raise spec_error(source, [(Place(source, 1), problem)])
    if not document.data.keys() <= TOP:
        from orchestrator.specs.foreign.other_tools import foreign_file

        if (foreign := foreign_file(document)) is not None:
            raise spec_error(source, [(document.place_of(foreign.path), foreign)])
    with_variables = "${" in text
    for override in overrides:
        if override.startswith(OVERLAY):
            from orchestrator.specs.overlays import lay_over

            lay_over(document, Path(override.removeprefix(OVERLAY)))
            with_variables = True
    _override(document, [one for one in overrides if not one.startswith(OVERLAY)])
    if with_variables:
        from orchestrator.specs.variables import expand

        expand(document, environ)
    _use_settings(document, environ)
    _check_patterns(document)
    _check_name(document)
    return document


def _use_settings(document: Document, environ: Mapping[str, str] | None) -> None:
    """Put the user's settings where the spec and the options say nothing."""
    if environ is not None and has_user_config(environ):
        from orchestrator.specs.user_config import lay_under

        lay_under(document, environ)


TOP = {*fields_of(JobSpec), "run"}
"""Keys at the top of a spec."""
OF_OTHERS = (".py", ".toml")
"""Files of other tools, which are not YAML."""
OF_THE_TRAINER = ("model", "data", "train", "parallel", "objective")
"""Keys that describe a job of the bundled trainer."""


def _advised(problems: Sequence[Problem]) -> Sequence[Problem]:
    from orchestrator.specs.advice import advised

    return advised(problems)


OFTEN_FOR_RUN = ("command", "cmd", "entrypoint", "script", "module", "program")
"""Keys that other tools have for the user's program."""


def _class_of(document: Document) -> type[CommonSpec]:
    """Which kind of spec it is. Reports keys of the other kind."""
    data = document.data
    for key in filter(data.__contains__, OFTEN_FOR_RUN):
        from orchestrator.specs.foreign.command_lines import run_of

        limit = "inside run, which names your own program"
        fix = f"write {run_of(data[key])}"
        document.report(Problem(path=key, value=data[key], limit=limit, fix=fix))
    if "run" not in data and not any(key in data for key in OFTEN_FOR_RUN):
        return JobSpec
    both = [key for key in OF_THE_TRAINER if key in data] if "run" in data else []
    for key in ["run", *both] if both else []:
        others = "run" if key != "run" else ", ".join(both)
        place = document.place_of("run" if key != "run" else both[0])
        document.report(
            Problem(
                path=key,
                limit=f"left out beside {others} ({place})",
                fix="keep run to train with your own program, or the other keys to train with the"
                " bundled trainer",
            )
        )
    return ScriptSpec


def _check_patterns(document: Document) -> None:
    """Compile the user's patterns. They are searched in all text that a job writes, so they must be
    of an engine whose time grows only linearly with the text. The contract does not know that
    engine, because the trainer also imports the contract."""
    resilience = document.data.get("resilience")
    classes = resilience.get("failure_classes") if isinstance(resilience, dict) else None
    for number, rule in enumerate(classes if isinstance(classes, list) else ()):
        for key in ("patterns", "unless"):
            patterns = rule.get(key) if isinstance(rule, dict) else None
            for place, pattern in enumerate(patterns if isinstance(patterns, list) else ()):
                wrong = problem_of(pattern) if isinstance(pattern, str) else None
                if wrong is not None:
                    path = f"resilience.failure_classes[{number}].{key}[{place}]"
                    limit, fix = wrong
                    document.report(Problem(path=path, value=pattern, limit=limit, fix=fix))


def _check_name(document: Document) -> None:
    """Compare the job's name with the limit of its pods' names. A struct would compare its fields
    only if each of them is right, and so in a later run than that which reports those."""
    name, cluster = document.data.get("name"), document.data.get("cluster")
    if not isinstance(cluster, dict) or cluster.get("backend") != "kubernetes":
        return
    asked, hosts = cluster.get("kubernetes"), cluster.get("hosts")
    kind = asked.get("kind") if isinstance(asked, dict) else None
    kinds: tuple[Kind, ...] = get_args(Kind)
    known = next((one for one in kinds if one == kind), kinds[0])
    if isinstance(name, str) and KUBERNETES_NAME.admits(name):
        long = too_long_name(known, name, hosts if isinstance(hosts, int) else 1)
        if long is not None:
            document.report(long)


def of_the_trainer(spec: CommonSpec, what: str) -> JobSpec:
    """`spec`, for a command that needs a job of the bundled trainer.

    Raises:
        SpecError: it runs the user's own program; `what` is the command.
    """
    if isinstance(spec, JobSpec):
        return spec
    raise SpecError(
        f"{what} needs a job of the bundled trainer, but {spec.name} runs your own program",
        fix="give a spec with model, data and train",
    )


def dump_spec(spec: CommonSpec) -> str:
    """`spec` as YAML with every default written out, without `kubernetes` if the job does not use
    it. `load_spec` reads it back as an equal spec."""
    given, cluster = _without_absent(spec), spec.cluster
    # A reader first wants to know what the job trains.
    body = {key: given[key] for key in ("name", "run", *OF_THE_TRAINER) if key in given} | given
    if cluster.backend != "kubernetes" and cluster.kubernetes == KubernetesSpec():
        del body["cluster"]["kubernetes"]
    if "${" in repr(body):
        from orchestrator.specs.variables import escape

        escape(body)
    text: str = yaml.dump(body, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def _without_absent(spec: Any) -> Any:
    """`spec` encoded, without keys that are null because they were not given."""
    if not isinstance(spec, Struct):
        return encode(spec)
    given = [(f, getattr(spec, f.name)) for f in fields(spec)]
    return {
        key_of(f.name): _without_absent(value)
        for f, value in given
        if not (value is None and f.default is None)
    }


def _override(document: Document, overrides: Sequence[str]) -> None:
    """Put the values of `a.b.c=VALUE` into the document."""
    for option, override in map(_option_of, overrides):
        path, equals, text = override.partition("=")
        path = path.strip()
        keys = path.split(".")
        place = f"{option} {override}"
        if not (equals and all(keys)):
            limit = "written as KEY=VALUE"
            fix = f"for example {option} {'train.steps=100' if option == SET else 'parallel.tp=2'}"
            said = Problem(path=override or '""', limit=limit, fix=fix)
            document.problems.append((f"{option} {said.path}", said))
            continue
        try:
            value = parse(text, place)
        except SpecError as exc:
            fix = f"quote the value: {option} '{path}=\"…\"'"
            limit = f"a YAML value ({exc.message.rpartition('not YAML: ')[2]})"
            problem = Problem(path=path, value=text, limit=limit, fix=fix)
            document.problems.append((f"{option} {path}", problem))
            continue
        document.problems += [
            (f"{option} {path}", replace(problem, path=join(path, problem.path)))
            for _, problem in value.problems
        ]
        _put(document, keys, value.data, option)


def _option_of(override: str) -> tuple[str, str]:
    """The option that was typed, and its `KEY=VALUE`."""
    option, space, rest = override.partition(" ")
    return (option, rest) if space and option.startswith("--") else (SET, override)


def _put(document: Document, keys: Sequence[str], value: Any, option: str) -> None:
    inside = document.data
    path = ".".join(keys)
    for depth, key in enumerate(keys[:-1], 1):
        if inside.get(key) is None:
            inside[key] = {}
        inside = inside[key]
        if not isinstance(inside, dict):
            above = ".".join(keys[:depth])
            limit = f"a key of a mapping, but {above} is a single value"
            problem = Problem(path=path, limit=limit, fix=f"set {above} itself: {option} {above}=…")
            document.problems.append((f"{option} {path}", problem))
            return
    inside[keys[-1]] = value
    document.overridden.pop(path, None)
    document.overridden[path] = option
