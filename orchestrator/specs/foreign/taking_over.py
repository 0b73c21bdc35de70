"""Takes a file of another tool over as a job spec: `ndctl init --from`."""

import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NoReturn

from orchestrator.errors import SpecError
from orchestrator.specs.foreign.batch_script import from_script
from orchestrator.specs.foreign.carried import Carried
from orchestrator.specs.foreign.other_tools import foreign_file
from orchestrator.specs.foreign.pods.from_pods import from_pods
from orchestrator.specs.foreign.pods.manifests import (
    DEEPEST,
    KINDS,
    MOST_VALUES,
    at,
    documents_in,
    is_braced,
    is_too_large,
    looks_like_manifest,
    objects_in,
    reads,
    training_in,
)
from orchestrator.specs.foreign.pods.wrong_types import wrong_types
from orchestrator.yaml_document import parse

TOO_LONG = re.compile(r"\d{1000}")
SHELL = re.compile(r"#!.*\b(ba|z|da|k)?sh\b")
HELM = re.compile(r"\{\{(-|\s*(\.|\$|/\*|(if|range|include|with|define|template|toYaml|tpl) ))")

RUNS = re.compile(r"Job$|Workflow(Template)?$|^(RayCluster|StatefulSet)$")
"""Kinds that run a program, and that ndctl does not read."""

OWN = re.compile(r"^(cluster|model|run|train)\s*:", re.MULTILINE)


def taken_over(text: str, path: PurePath, own_path: str = "") -> Carried:
    """The spec that a batch script or a manifest describes. `own_path`: the absolute path of a
    script, for what it starts in its own folder; empty if that is not known.

    Raises:
        SpecError: it is neither, or nothing in it trains.
    """
    if TOO_LONG.search(text):  # Python reads no number of more than 4,300 digits
        raise SpecError(
            f"{path} has a number of 1,000 digits or more", fix="check that it is the right file"
        )
    if is_script(text, path):
        return from_script(text, path.stem, own_path)
    if not looks_like_manifest(text):
        _refuse_other(text, path)
    _check_types(text, path)
    found = [*training_in(text)]
    if not found:
        words, fix = nothing_in(text, path)
        raise SpecError(f"{path}: {words}", fix=fix)
    one, pods = found[0]
    _refuse_own(one, path)
    carried = from_pods(one, pods, path.stem)
    beside = [
        f"{each.get('kind')} {at(each, 'metadata', 'name')}"
        for each in objects_in(text)
        if each.get("kind") and each not in [one for one, _ in found]
    ]
    if beside:
        more = [f"and {len(beside) - MOST_SAID} more"] if len(beside) > MOST_SAID else []
        names = ", ".join([*beside[:MOST_SAID], *more])
        carried.before.append(f"create what else is in {path.name}, if the job needs it: {names}")
    for other, _ in found[1:]:
        if "Runtime" not in str(other.get("kind")):
            name = at(other, "metadata", "name")
            carried.leave(f"{other['kind']} {name}: a spec is one job; give it a file of its own")
    return carried


def _refuse_other(text: str, path: PurePath) -> NoReturn:
    """Refuses what is neither a script of a shell nor a manifest."""
    if is_braced(text):
        documents_in(text, str(path))
    if text.lstrip().startswith("{{") and HELM.search(text):
        raise SpecError(f"{path}: {OF_HELM[0]}", fix=OF_HELM[1])
    if OWN.search(text):
        _refuse_yaml(text, path)
    if path.suffix == ".py":
        what = shlex.quote(str(path))
        raise SpecError(
            f"{path} is a Python script",
            fix=f"ndctl run -- {what}, or `ndctl init --train {what}` for a spec",
        )
    raise SpecError(
        f"{path}: neither a script of a shell nor a manifest of Kubernetes",
        fix="write a first spec with `ndctl init`, or give such a file",
    )


def _refuse_yaml(text: str, path: PurePath) -> None:
    """Refuses a job spec, and a file of another tool with keys of the same names."""
    try:
        document = parse(text, str(path))
    except SpecError:
        if path.suffix not in (".yaml", ".yml"):  # such as a Makefile with the target `train:`
            return
    else:
        foreign = foreign_file(document) if isinstance(document.data, dict) else None
        if foreign is not None:
            raise SpecError(f"{path}: {foreign.words}", fix=foreign.fix)
    what = shlex.quote(str(path))
    raise SpecError(
        f"{path} looks like a job spec already",
        fix=f"`ndctl validate {what}` checks it, `ndctl submit {what}` starts it",
    )


OWN_LABEL = "ndctl.dev/job"
"""The label of all objects of a job of ndctl."""


def _refuse_own(one: Mapping[str, Any], path: PurePath) -> None:
    """An object of a job of ndctl has the program of its agents, and no spec."""
    job = at(one, "metadata", "labels", OWN_LABEL)
    if job is None:
        return
    namespace = at(one, "metadata", "namespace")
    place = f" -n {shlex.quote(str(namespace))}" if namespace else ""
    name = shlex.quote(f"{job}-launch")
    raise SpecError(
        f"{path}: {one['kind']} {at(one, 'metadata', 'name')} belongs to {job}, a job of ndctl",
        fix=f"`kubectl{place} get configmap {name} -o jsonpath='{{.data.spec\\.yaml}}'` prints the"
        " spec of that job",
    )


MOST_SAID = 20
"""Most values of wrong types, or objects, that one message names."""


def _check_types(text: str, path: PurePath) -> None:
    wrong = [
        f"{one.get('kind')}: {what}"
        for one in objects_in(text)
        if reads(one)
        for what in wrong_types(one)
    ]
    if wrong:
        more = [f"and {len(wrong) - MOST_SAID} more"] if len(wrong) > MOST_SAID else []
        raise SpecError(
            f"{path}: Kubernetes would refuse it: {'; '.join([*wrong[:MOST_SAID], *more])}",
            fix=f"correct it; `kubectl create --dry-run=server -f {shlex.quote(str(path))}` checks"
            " a manifest",
        )


SUFFIXES = frozenset((".sh", ".bash", ".sbatch", ".slurm", ".pbs", ".lsf", ".qsub"))
"""Of scripts that often have no first line with `#!`."""


def is_script(text: str, path: PurePath) -> bool:
    """Whether a shell reads it."""
    if text.startswith("#!"):
        return SHELL.match(text) is not None
    if path.suffix in SUFFIXES and not looks_like_manifest(text):
        return True
    return re.search(r"^#(SBATCH|PBS|BSUB) ", text, re.MULTILINE) is not None


OF_HELM = (
    "this is a template of Helm, not a manifest",
    "helm template CHART > manifest.yaml, then ndctl init --from manifest.yaml",
)
TOO_LARGE = (
    f"its jobs and pods are too large: together they have more than {MOST_VALUES:,} values, or are"
    f" nested more than {DEEPEST} deep",
    "give a manifest of one job",
)
"""What it is, and what to do."""
NO_OBJECT = "this manifest is a list without objects"


def nothing_in(text: str, path: PurePath) -> tuple[str, str]:
    """Why a manifest has no job that can be taken over, and what to do.

    Raises:
        SpecError: it is neither YAML nor JSON.
    """
    if HELM.search(text):
        return OF_HELM
    documents_in(text, str(path))
    if is_too_large(text):
        return TOO_LARGE
    return _why_nothing(text), _fix_of_nothing(text, path)


def _why_nothing(text: str) -> str:
    found = re.findall(r"^kind: *[\"']?(\w+)", text, re.MULTILINE)
    found = found or [str(one.get("kind")) for one in objects_in(text)]  # of JSON
    if not found:
        return NO_OBJECT
    kinds = ", ".join(dict.fromkeys(found))
    known = {kind for _, kind in KINDS}
    unknown = [kind for kind in kinds.split(", ") if RUNS.search(kind) and kind not in known]
    if unknown:
        return f"ndctl takes no {' or '.join(unknown)} over"
    return f"no job that trains is in this manifest ({kinds})"


def _fix_of_nothing(text: str, path: PurePath) -> str:
    if _why_nothing(text) == NO_OBJECT:
        return "give the manifest of a job"
    creates = f"`kubectl apply -f {shlex.quote(str(path))}` creates it"
    if "takes no" in _why_nothing(text):
        return f"{creates}; ndctl takes {', '.join(dict.fromkeys(kind for _, kind in KINDS))} over"
    return creates


def command_for(path: PurePath) -> str:
    """What to type for a file that can be taken over."""
    return f"ndctl init --from {shlex.quote(str(path))}"
