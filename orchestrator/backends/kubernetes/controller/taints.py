"""Taints nodes that jobs exclude, so that other pods avoid them too, and notes the reason. Pure.

A taint is removed when no running job excludes the node any more. Taints of other programs or of
another controller are not touched.
"""

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.backends.kubernetes.controller.actions import Patch, Ref
from orchestrator.backends.kubernetes.controller.pod_requests import excluded_of
from orchestrator.backends.kubernetes.observe import object_fields, observe
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import NODES, Object, lookup, name_of

TAINT: Mapping[str, str] = {"key": names.EXCLUDED_ANNOTATION, "effect": "NoSchedule"}


def taints(
    nodes: Sequence[Object], jobs: Sequence[Object], namespace: str | None
) -> Iterator[Patch]:
    """`jobs`: all jobs of `namespace`; None: of all namespaces."""
    by: dict[str, str] = {}
    for job in jobs:
        if observe.has_ended(job) or names.CANCELLED_ANNOTATION in object_fields.annotations_of(
            job
        ):
            continue
        for host in excluded_of(job):
            place = f"{job['metadata'].get('namespace', '')}/{name_of(job)}"
            # Several jobs may exclude a node. The smallest name is the same each round, so the note
            # does not change back and forth.
            by[host] = min(place, by.get(host, place))
    for node in nodes:
        said = object_fields.annotations_of(node).get(names.EXCLUDED_ANNOTATION)
        wanted = by.get(name_of(node))
        # A controller of another namespace has set it and knows when to remove it.
        if said is not None and not _is_of(said, namespace):
            continue
        # The taint may be missing although it is noted, because a person removed it.
        if wanted is not None and (said is None or not _has_taint(node)):
            yield _tainted(node, wanted)
        elif wanted is None and said is not None:
            yield _untainted(node, said)


def _is_of(said: str, namespace: str | None) -> bool:
    return namespace is None or said.partition("/")[0] == namespace


def _others(node: Object) -> list[Object]:
    found: Sequence[Object] = lookup(node, ("spec", "taints"), ())
    return [one for one in found if one.get("key") != TAINT["key"]]


def _has_taint(node: Object) -> bool:
    return len(_others(node)) < len(lookup(node, ("spec", "taints"), ()))


def _tainted(node: Object, job: str) -> Patch:
    what = Ref.of(NODES, node)
    return Patch(
        what=what,
        change={
            "metadata": {"annotations": {names.EXCLUDED_ANNOTATION: job}},
            "spec": {"taints": [*_others(node), dict(TAINT)]},
        },
        does=f"taint {what}",
        reason=f"job {job} excluded it: `ndctl describe` of that job shows why",
    )


def _untainted(node: Object, job: str) -> Patch:
    what = Ref.of(NODES, node)
    return Patch(
        what=what,
        change={
            "metadata": {"annotations": {names.EXCLUDED_ANNOTATION: None}},
            "spec": {"taints": _others(node) or None},
        },
        does=f"remove the taint from {what}",
        reason=f"no job excludes it any more; {job} did",
    )
