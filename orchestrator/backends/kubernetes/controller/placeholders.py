"""Placeholder pods: an idle pod on each node that a job excludes keeps the job's pods off it. Pure.

They are for kinds whose pod template cannot change once the job exists. The job's pods, and no
others, have an anti-affinity to the placeholder's label. A placeholder is deleted when its job ends
or is deleted.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.backends.kubernetes.controller.actions import Action, Create, Delete, Ref
from orchestrator.backends.kubernetes.controller.pod_requests import excluded_of
from orchestrator.backends.kubernetes.observe import object_fields, observe
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.render.topology import CHANGEABLE
from orchestrator.backends.kubernetes.resources import (
    JOB_KINDS,
    PODS,
    Object,
    lookup,
    name_of,
    owner_reference,
)
from orchestrator.contract.spec.kubernetes_spec import Kind

WAIT = "import signal; signal.pause()"
RESOURCES: Mapping[str, str] = {"cpu": "10m", "memory": "64Mi"}
"""Requests and limits, because a quota may require them, and pods without requests are evicted
first."""
LIKE = ("imagePullSecrets", "priorityClassName", "securityContext")
"""Copied from the job's pods. With a lower priority, these would preempt the placeholder."""


def placeholders(
    jobs: Sequence[tuple[Kind, Object]], pods: Sequence[Object], nodes: Sequence[Object]
) -> Iterator[Action]:
    """Placeholders to create and to delete; `pods` may include other pods."""
    there = {(*_owner(pod), object_fields.node_of(pod)): pod for pod in pods if _owner(pod)[1]}
    known = {name_of(node) for node in nodes}
    for kind, job in jobs:
        place = (str(lookup(job, ("metadata", "namespace"), "")), name_of(job))
        # A pod that is bound to a node that does not exist is deleted by Kubernetes, and would be
        # created again each round.
        wanted = _left_out(kind, job) & known
        for host in sorted(wanted):
            found = there.pop((*place, host), None)
            if found is None:
                yield from _make(kind, job, host, pods)
            # A placeholder that ended no longer keeps pods off. A new one needs its name, so it is
            # deleted first.
            elif not object_fields.alive([found]):
                yield _delete(found, f"it has ended, and {host} is still excluded")
        for host in sorted(host for *of, host in there if tuple(of) == place):
            yield _delete(there[(*place, host)], f"{place[1]} no longer excludes {host}")


def _owner(pod: Object) -> tuple[str, str]:
    """Namespace and name of the placeholder's job; empty name: not a placeholder."""
    label = lookup(pod, ("metadata", "labels", names.KEEPS_OFF_LABEL), "")
    return str(lookup(pod, ("metadata", "namespace"), "")), str(label)


def _left_out(kind: Kind, job: Object) -> set[str]:
    over = observe.has_ended(job) or names.CANCELLED_ANNOTATION in object_fields.annotations_of(job)
    return set() if kind in CHANGEABLE or over else {*excluded_of(job)}


def _make(kind: Kind, job: Object, host: str, pods: Sequence[Object]) -> Iterator[Create]:
    """Needs a pod of the job, to copy its image and account."""
    namespace, name = job["metadata"].get("namespace", ""), name_of(job)
    theirs = [
        pod
        for pod in object_fields.pods_of(job, pods)
        if lookup(pod, ("metadata", "namespace"), "") == namespace
    ]
    # Without a pod there is no image to copy. The next round, when a pod exists, creates the
    # placeholder.
    if theirs:
        made = _placeholder(kind, job, host, theirs[0])
        uid = str(job["metadata"].get("uid", ""))
        called = made["metadata"]["name"]
        yield Create(
            what=Ref(resource=PODS, namespace=namespace, name=called, uid=uid, version=""),
            item=made,
            reason=f"job {namespace}/{name} excluded {host}, and its pods cannot be changed",
        )


def _placeholder(kind: Kind, job: Object, host: str, like: Object) -> dict[str, Any]:
    name, resource = name_of(job), JOB_KINDS[kind].resource
    spec: Mapping[str, Any] = like["spec"]
    own = names.CONTAINERS[kind]
    # A user's own containers may be in the pod too. The image must have Python.
    main = next((one for one in spec["containers"] if one["name"] == own), spec["containers"][0])
    pull = {"imagePullPolicy": main["imagePullPolicy"]} if "imagePullPolicy" in main else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.placeholder_of(name, host),
            "namespace": job["metadata"].get("namespace", ""),
            "labels": {
                names.MANAGED_LABEL: "ndctl",
                "app.kubernetes.io/part-of": "ndctl",
                names.KEEPS_OFF_LABEL: name,
            },
            "ownerReferences": [owner_reference(resource, job)],
        },
        "spec": {
            # The scheduler is bypassed: it would not choose a cordoned or full node, and the
            # placeholder must be on this one.
            "nodeName": host,
            **{key: spec[key] for key in LIKE if key in spec},
            # It needs no rights.
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            # An excluded node may have a NoExecute taint, as an unreachable node has, which would
            # evict the placeholder.
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": "placeholder",
                    "image": main["image"],
                    **pull,
                    "command": [main["command"][0], "-c", WAIT],
                    "resources": {"requests": dict(RESOURCES), "limits": dict(RESOURCES)},
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def _delete(pod: Object, reason: str) -> Delete:
    return Delete(what=Ref.of(PODS, pod), reason=reason, grace_s=0)
