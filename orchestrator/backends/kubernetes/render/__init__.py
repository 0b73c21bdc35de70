"""Renders a job as Kubernetes objects. `ndctl render … | kubectl apply -f -` does exactly what
`ndctl submit` does. Pure: the same input gives the same text.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from orchestrator.backends.kubernetes.render import kinds, names
from orchestrator.backends.kubernetes.render.checks import problems, too_large
from orchestrator.backends.kubernetes.render.rights import account_objects, network_policy
from orchestrator.backends.kubernetes.render.state_map import state_map
from orchestrator.backends.kubernetes.render.submission import config_map, token_secret
from orchestrator.contract.codec import Invalid, Problem
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.contract.submission_payload import Handover, files_of
from orchestrator.contract.visible import visible
from orchestrator.errors import SpecError
from orchestrator.yaml_document import Dumper

__all__ = ["mistakes", "objects", "text", "token_secret"]

KINDS: Mapping[Kind, Callable[[Handover, dict[str, Any]], list[dict[str, Any]]]] = {
    "pytorchjob": kinds.pytorchjob,
    "jobset": kinds.jobset,
    "trainjob": kinds.trainjob,
}


def objects(handover: Handover, namespace: str = "default") -> list[dict[str, Any]]:
    """In the order in which they are applied; the first is the ConfigMap, the last is the job.

    `namespace`: where they are applied if the spec does not say.

    Raises:
        SpecError: with all mistakes in `cluster.kubernetes`.
        BackendError: the plan is too large for a ConfigMap.
    """
    made, found = _checked(handover, namespace)
    if found:
        raise SpecError("\n".join(str(one) for one in found)) from Invalid(found)
    return made


def mistakes(handover: Handover) -> tuple[Problem, ...]:
    """All mistakes in `cluster.kubernetes`, each with its place, value, limit and fix.

    Raises:
        BackendError: the plan is too large for a ConfigMap.
    """
    return _checked(handover, "default")[1]


def _checked(
    handover: Handover, namespace: str
) -> tuple[list[dict[str, Any]], tuple[Problem, ...]]:
    """The objects, and what is wrong with them. A spec with mistakes gives no objects."""
    launch = handover.launch
    if found := tuple(problems(launch)):
        return [], found
    made = _rendered(handover, namespace)
    return made, tuple(too_large(made, launch.kubernetes_spec))


def _rendered(handover: Handover, namespace: str) -> list[dict[str, Any]]:
    launch, spec = handover.launch, handover.launch.kubernetes_spec
    own = {"namespace": spec.namespace} if spec.namespace else {}
    labels = names.labels_of(launch)
    queue = {names.QUEUE_LABEL: spec.queue} if spec.queue else {}
    metadata = {
        "name": launch.job,
        **own,
        "labels": {**spec.labels, **labels, **queue},
        "annotations": {
            **spec.annotations,
            names.LAUNCH_ANNOTATION: str(launch.launch),
            names.HASH_ANNOTATION: spec_hash(handover),
        },
    }
    beside = {**own, "labels": labels}
    return [
        config_map(handover, {"name": names.config_map_of(launch.job), **beside}),
        state_map(launch, beside),
        *account_objects(launch, beside, spec.namespace or namespace),
        *network_policy(launch, beside),
        *KINDS[spec.kind](handover, metadata),
    ]


def spec_hash(handover: Handover) -> str:
    """Two launches with the same hash are equal."""
    body = json.dumps(files_of(handover), sort_keys=True).encode()
    return hashlib.sha256(body).hexdigest()[:16]


class _Dumper(Dumper):
    """Writes lists of numbers in one line."""


def _list(dumper: Any, value: Sequence[Any]) -> Any:
    numbers = bool(value) and all(isinstance(one, int) for one in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=numbers)


_Dumper.add_representer(list, _list)


def text(made: Sequence[Mapping[str, Any]]) -> str:
    """YAML documents for kubectl, with keys in insertion order."""
    documents = "---\n".join(_document(one, allow_unicode=True) for one in made)
    if visible(documents, keep="\n\t") != documents:
        # What is printed must be what is applied, so YAML itself writes these characters out.
        documents = "---\n".join(_document(one, allow_unicode=False) for one in made)
    return documents.removesuffix("\n")


def _document(made: Mapping[str, Any], allow_unicode: bool) -> str:
    text: str = yaml.dump(
        dict(made), Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode, width=100
    )
    return text
