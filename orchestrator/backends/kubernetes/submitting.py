"""Creates the objects of a rendered job in the cluster: all of them, or none.

ConfigMap JOB-launch is created first, and it owns the job's Secret, account and policy. The job is
created last and then becomes the owner of the ConfigMap. So a single delete removes everything at
any moment: of the ConfigMap if a create fails, and of the job afterwards.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from orchestrator.backends.kubernetes.api.api_errors import (
    Conflict,
    Forbidden,
    Missing,
    RuntimeUnseen,
)
from orchestrator.backends.kubernetes.api.client import Api, ApiReader
from orchestrator.backends.kubernetes.api.watch_cache import ListWatch
from orchestrator.backends.kubernetes.checks import permissions
from orchestrator.backends.kubernetes.controller.pod_requests import belongs_to
from orchestrator.backends.kubernetes.observe import object_fields
from orchestrator.backends.kubernetes.observe.object_fields import LABEL
from orchestrator.backends.kubernetes.render import names, objects, token_secret
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CONFIG_MAPS,
    JOB_KINDS,
    PODS,
    POLICIES,
    ROLE_BINDINGS,
    ROLES,
    RUNTIMES,
    SECRETS,
    JobKind,
    Object,
    Resource,
    lookup,
    name_of,
    owner_reference,
    resource_of,
)
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, Unanswered, Unsettled
from orchestrator.job_secret import draw

log = logging.getLogger(__name__)

GONE_S = 60.0
"""Time limit for deleting what an ended job left."""
AGAIN_S = (1.0, 3.0, 6.0)
"""Pause before a create without an answer, or one whose runtime is not seen yet, is retried."""
FRESH_S = 30.0
"""For this long another submission of the same name may be running."""
LOOK_S = 0.5


class Helper(Struct, frozen=True):
    """A helper object of the job, such as its ConfigMap."""

    resource: Resource
    name: str

    def __str__(self) -> str:
        return f"{self.resource.kind} {self.name}"


def helpers_of(spec: KubernetesSpec, job: str) -> list[Helper]:
    """All helper objects that may exist, also those of a launch with other settings. The ConfigMap
    is last, because its existence shows that others may remain."""
    account = names.account_of(job)
    runtime = [Helper(RUNTIMES, job)] if spec.kind == "trainjob" else []
    return [
        Helper(SECRETS, names.secret_of(job)),
        *(Helper(one, account) for one in (POLICIES, ROLE_BINDINGS, ROLES, ACCOUNTS)),
        *runtime,
        Helper(CONFIG_MAPS, names.state_map_of(job)),
        Helper(CONFIG_MAPS, names.config_map_of(job)),
    ]


def submit(api: Api, namespace: str, handover: Handover) -> None:
    """Create all objects, the job last.

    Raises:
        Unsettled: the API server became unreachable; created objects may remain.
        BackendError: a request was rejected; created objects were deleted again.
    """
    launch = handover.launch
    spec = launch.kubernetes_spec
    made = objects(handover, namespace)
    former = api.get(JOB_KINDS[spec.kind].resource, namespace, launch.job)
    if former is not None and _is_made(former, made[-1]):
        return  # created by an earlier call whose answer was lost
    if former is not None:
        # The same number but other content: another terminal has drawn this number at the same
        # time.
        if object_fields.launch_of(former) == launch.launch and not object_fields.is_leaving(
            former
        ):
            raise _by_another(launch.job, namespace)
        # Check the rights first: a replacement that stops halfway would leave neither job.
        permissions.require(
            api,
            permissions.replacing(spec),
            namespace,
            f"the previous launch of {launch.job} stays; nothing was submitted",
        )
        take_away(api, namespace, spec, former)
    _take_remains_away(api, namespace, spec, launch.job)
    # The token is drawn last, so that no text, such as the output of `ndctl render`, contains it.
    _make(api, namespace, [*made[:-1], token_secret(launch, draw())], made[-1])


def _make(api: Api, namespace: str, helpers: Sequence[Object], job: Object) -> None:
    """Create all objects; the ConfigMap is the first of `helpers`."""
    kind = next(one for one in JOB_KINDS.values() if one.resource == resource_of(job))
    there: list[Object] = []
    try:
        there.append(_created(api, namespace, helpers[0]))
        owner = [owner_reference(CONFIG_MAPS, there[0])]
        for item in helpers[1:]:
            owned = {**item, "metadata": {**item["metadata"], "ownerReferences": owner}}
            there.append(_created(api, namespace, owned))
        made = _created(api, namespace, job)
    except BaseException as exc:  # also after ^C
        # Not only errors: after ^C the objects of half a job would stay, and block the next
        # submission.
        found = _take_back(api, namespace, kind, there, job, exc)
        if found is None:
            raise
        log.warning("%s exists although the create failed: %s", name_of(job), exc)
        made = found
    _adopted(api, namespace, kind, made, there[0])


def _created(api: Api, namespace: str, item: Object) -> Object:
    """Create it. After a lost answer it is unknown whether the object exists, and it may be our
    own; but not if it was there before."""
    may_be_mine = was_there = False
    for wait_s in (*AGAIN_S, None):
        try:
            return api.create(item, namespace)
        except Conflict as exc:
            found = _found(api, namespace, item) if may_be_mine else None
            if found is not None:
                return found
            if wait_s is None or not _may_vanish(api, namespace, item):
                raise _another(item, namespace, exc) from exc
            was_there = True
        except (Unanswered, RuntimeUnseen):  # the runtime was created just before its TrainJob
            if wait_s is None:
                raise
            may_be_mine = not was_there
        api.clock.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def _may_vanish(api: Api, namespace: str, item: Object) -> bool:
    """Whether the object in the place of `item` is of a former job, so that Kubernetes deletes it:
    the new ConfigMap, its owner, was just created, so the former owner is gone."""
    if not _owners(item):
        return False
    try:
        there = api.get(resource_of(item), namespace, name_of(item))
    except Forbidden:
        return True
    return there is None or (_is_of_job(there, item) and _owners(there) != _owners(item))


def _found(api: Api, namespace: str, item: Object) -> Object | None:
    """The existing object, if it is the one that an earlier try created. Without the right to read
    it, assume so, because it did not exist before."""
    try:
        there = api.get(resource_of(item), namespace, name_of(item))
    except Forbidden:
        return item
    if there is None:
        return None
    return there if _is_of_job(there, item) and _owners(there) == _owners(item) else None


def _owners(item: Object) -> Any:
    return lookup(item, ("metadata", "ownerReferences"), [])


def _is_of_job(there: Object, item: Object) -> bool:
    """Whether `there` belongs to the job of `item`."""
    return is_ours(there, lookup(item, ("metadata", "labels", LABEL)))


def _another(item: Object, namespace: str, exc: Conflict) -> BackendError:
    kind, name = resource_of(item), name_of(item)
    return BackendError(
        f"{kind.kind} {name} of namespace {namespace} was created meanwhile: another submission of"
        " this name is running, or the object has another owner",
        fix=f"`kubectl -n {namespace} get {kind.word} {name} -o yaml` shows the owner; use"
        f" another name, or `kubectl -n {namespace} delete {kind.word} {name}` and submit again",
    )


def _is_made(there: Object, job: Object) -> bool:
    """Whether `there` is the job being submitted."""
    mine, theirs = object_fields.annotations_of(job), object_fields.annotations_of(there)
    keys = (names.LAUNCH_ANNOTATION, names.HASH_ANNOTATION)
    return not object_fields.is_leaving(there) and all(mine[key] == theirs.get(key) for key in keys)


def _take_back(
    api: Api,
    namespace: str,
    kind: JobKind,
    there: Sequence[Object],
    job: Object,
    why: BaseException,
) -> Object | None:
    """Delete the objects that were created before the error `why`. If the job was created after all
    (its answer was lost), return it and delete nothing.

    Raises:
        Unsettled: the API server is unreachable.
    """
    name, lost = name_of(job), isinstance(why, Unanswered)
    try:
        found = api.get(kind.resource, namespace, name)
        # The create of the job has succeeded, and only its answer was lost.
        if found is not None and lost and _is_made(found, job):
            return found
        # In reverse order, so that the ConfigMap is last: it shows that others may remain.
        for item in reversed(there):
            _delete(api, namespace, item)
        if lost and not there:  # the first create may have succeeded without an answer
            first = api.about(CONFIG_MAPS, namespace, names.config_map_of(name))
            if first is not None and is_ours(first, name):
                uid = first["metadata"]["uid"]
                api.delete(CONFIG_MAPS, namespace, name_of(first), uid=uid)
    except BackendError as exc:
        left = ", ".join(f"{resource_of(one).kind} {name_of(one)}" for one in there) or "nothing"
        raise Unsettled(
            f"job {name} was submitted only partly, and cleaning up failed"
            f" (found: {left}; {exc.message}): {_words(why)}",
            fix="once the API server is reachable: run `ndctl submit` again; or"
            f" `ndctl cancel {name} -n {namespace}`, which removes what was created",
        ) from exc
    return None


def _delete(api: Api, namespace: str, item: Object) -> None:
    """Kubernetes deletes the rest with the ConfigMap that owns it."""
    resource, uid = resource_of(item), lookup(item, ("metadata", "uid"), "")
    if not uid:
        return  # no right to read a Secret
    try:
        api.delete(resource, namespace, name_of(item), uid=uid)
    except Forbidden:
        # The others are deleted with the ConfigMap that owns them. If that one stays, all stay.
        if resource == CONFIG_MAPS:
            raise
    except Conflict:
        pass  # the name belongs to another object by now


def _words(why: BaseException) -> str:
    return why.message if isinstance(why, BackendError) else type(why).__name__


def _adopted(api: Api, namespace: str, kind: JobKind, job: Object, config_map: Object) -> None:
    """The job runs already, so an error here does not fail the submission."""
    try:
        adopt(api, namespace, kind, job, uid=str(lookup(config_map, ("metadata", "uid"), "")))
    except (Conflict, Missing) as exc:
        # Without the ConfigMap the pods would wait forever.
        api.delete(kind.resource, namespace, name_of(job), uid=job["metadata"]["uid"])
        raise _another(config_map, namespace, Conflict(exc.message)) from exc
    except BackendError as exc:
        log.warning(
            "%s runs without owning its ConfigMap yet; its leader will set the owner: %s",
            *(name_of(job), exc.message),
        )


def adopt(api: Api, namespace: str, kind: JobKind, job: Object, *, uid: str = "") -> None:
    """Make the job the owner of its ConfigMap, so that Kubernetes deletes both together, and remove
    the requests of an earlier job of this name. `uid`: only if the ConfigMap has this uid.

    Raises:
        Missing, Conflict: the ConfigMap does not exist, or has another uid.
        BackendError: the request failed.
    """
    name = names.config_map_of(name_of(job))
    if not uid:
        found = api.about(CONFIG_MAPS, namespace, name)
        if found is None:
            raise Missing(f"there is no ConfigMap {name} in namespace {namespace}")
        if belongs_to(found, job):
            return
    metadata: dict[str, Any] = {
        "ownerReferences": [owner_reference(kind.resource, job)],
        "annotations": dict.fromkeys(names.WRITTEN_BY_PODS),
        **({"uid": uid} if uid else {}),
    }
    api.merge(CONFIG_MAPS, namespace, name, {"metadata": metadata})


# Existing objects


def is_ours(item: Object, job: object) -> bool:
    """Whether ndctl's labels say that the object belongs to this job."""
    labels = lookup(item, ("metadata", "labels"), {})
    return bool(labels.get(names.MANAGED_LABEL) == "ndctl" and labels.get(LABEL) == job)


def strangers(api: ApiReader, namespace: str, spec: KubernetesSpec, job: str) -> Iterator[Helper]:
    """Objects with the name of one of the job's objects but another owner."""
    for helper in helpers_of(spec, job):
        # An object that we may not read is found by the create, which then fails with a conflict.
        with contextlib.suppress(Forbidden, Missing):
            found = api.get(helper.resource, namespace, helper.name)
            if found is not None and not is_ours(found, job):
                yield helper


def take_away(api: Api, namespace: str, spec: KubernetesSpec, job: Object) -> None:
    """Delete the job object of an ended launch; returns when it and its pods are gone."""
    name, kind = name_of(job), JOB_KINDS[spec.kind]
    api.delete(kind.resource, namespace, name, uid=job["metadata"]["uid"])
    api.delete_all(PODS, namespace, labels=f"{LABEL}={name}")
    deadline = api.clock.monotonic() + GONE_S
    for resource in (kind.resource, PODS):
        watching = ListWatch(
            api=api, resource=resource, namespace=namespace, labels=f"{LABEL}={name}"
        )
        for cache in watching.changes(deadline):
            # A new job of this name must not be created while the old one still exists: the create
            # would fail, and old pods would hold the devices.
            if not cache.items:
                break
        else:
            raise BackendError(
                f"{resource.kind} of the previous launch of {name} does not get deleted",
                fix=f"`kubectl -n {namespace} get {resource.word} -l {LABEL}={name} -o yaml` shows"
                " what blocks it (finalizers, an unreachable node)",
            )
    remove_remains(api, namespace, spec, name)


def _take_remains_away(api: Api, namespace: str, spec: KubernetesSpec, job: str) -> None:
    """Delete objects of an interrupted submission, or of a job that was deleted without them. If
    they are new, another submission may be running, so wait first."""
    found = api.about(CONFIG_MAPS, namespace, names.config_map_of(job))
    if found is not None and is_ours(found, job):
        age_s = api.clock.now() - object_fields.seconds_of(found["metadata"]["creationTimestamp"])
        if 0 <= age_s < FRESH_S:
            words = "%s was created %.0f s ago without a job: waiting %.0f s for the job"
            log.warning(words, f"ConfigMap {name_of(found)}", age_s, FRESH_S - age_s)
            api.clock.sleep(FRESH_S - age_s)
        # The other submission has finished while we waited.
        if api.get(JOB_KINDS[spec.kind].resource, namespace, job) is not None:
            raise _by_another(job, namespace)
    remove_remains(api, namespace, spec, job)


def _by_another(job: str, namespace: str) -> BackendError:
    return BackendError(
        f"job {job} was submitted by another command at the same time",
        fix=f"`ndctl status {job} -n {namespace}` shows it; or use another name",
    )


def remove_orphans(api: Api, namespace: str, spec: KubernetesSpec, job: str) -> None:
    """`remove_remains`, unless a job of any kind has this name and owns them."""
    for kind in JOB_KINDS.values():
        with contextlib.suppress(Missing, Forbidden):
            if api.get(kind.resource, namespace, job) is not None:
                return
    remove_remains(api, namespace, spec, job)


def remove_remains(api: Api, namespace: str, spec: KubernetesSpec, job: str) -> None:
    """Delete the helper objects of a deleted job and wait until they are gone. Only objects with
    the job's labels are deleted. Kubernetes may delete them at the same time."""
    deadline = api.clock.monotonic() + GONE_S
    for helper in helpers_of(spec, job):
        asked = ""
        while (found := _looked(api, namespace, helper)) is not None and is_ours(found, job):
            uid = found["metadata"]["uid"]
            # Ask once for each object. Another uid means that another submission has created a new
            # one.
            if uid != asked:
                with contextlib.suppress(
                    Forbidden, Conflict
                ):  # Kubernetes deletes it with its owner
                    api.delete(helper.resource, namespace, helper.name, uid=uid)
                asked = uid
            if api.clock.monotonic() >= deadline:
                raise BackendError(
                    f"{helper} of the previous launch of {job} does not get deleted",
                    fix=f"`kubectl -n {namespace} delete {helper.resource.word} {helper.name}`,"
                    " then submit again",
                )
            api.clock.sleep(LOOK_S)


def _looked(api: Api, namespace: str, helper: Helper) -> Object | None:
    """None also without the right to read it; Kubernetes then deletes it with its owner."""
    try:
        return api.about(helper.resource, namespace, helper.name)
    except (Forbidden, Missing):
        return None
