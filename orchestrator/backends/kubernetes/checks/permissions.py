"""The rights that a user needs in a namespace, and which are missing. They are checked before the
submission, so that it is not refused halfway."""

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import YOU, Forbidden
from orchestrator.backends.kubernetes.resources import (
    ACCOUNTS,
    CONFIG_MAPS,
    EVENTS,
    JOB_KINDS,
    PODS,
    POLICIES,
    ROLE_BINDINGS,
    ROLES,
    RUNTIMES,
    SECRETS,
    Object,
    Resource,
    lookup,
)
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.errors import BackendError, Unanswered

ROLE = "ndctl-user"
"""The Role in manifests/base, which has all rights."""
Need = Literal["submit", "again", "look"]
"""Needed to `submit` a job; to submit one `again` in place of an ended job; to `look` at a job from
outside the cluster."""


class Right(Struct, frozen=True):
    verb: str
    resource: Resource
    sub: str = ""
    need: Need = "submit"

    @property
    def word(self) -> str:
        return self.resource.word + (f"/{self.sub}" if self.sub else "")


class ApiReader(Protocol):
    """The part of `Api` that this module uses."""

    def create(self, item: Object, namespace: str) -> Object: ...
    def refusal(self, verb: str, path: str) -> BackendError | None: ...


def needed(spec: KubernetesSpec) -> tuple[Right, ...]:
    """The rights to submit, watch and cancel jobs like this one."""
    kind = JOB_KINDS[spec.kind].resource
    beside = [POLICIES] if spec.network_policy and not spec.host_network else []
    given: tuple[Right, ...] = ()
    if spec.service_account is None:
        beside += [ACCOUNTS, ROLES, ROLE_BINDINGS]
        # A user can only grant rights to the job's pods that the user has.
        of_pods = ("get", "list", "watch", *(("delete",) if spec.kind == "pytorchjob" else ()))
        given = (
            *(Right(verb, PODS) for verb in of_pods),
            *(Right(verb, EVENTS) for verb in ("list", "create")),
            Right("watch", kind),
        )
    if spec.kind == "trainjob":
        beside.append(RUNTIMES)
    found = (
        *(Right(verb, kind) for verb in ("get", "create", "patch")),
        # A submission that fails deletes the ConfigMap, and Kubernetes all objects that it owns.
        *(Right(verb, CONFIG_MAPS) for verb in ("get", "create", "patch", "delete")),
        Right("create", SECRETS),
        *(Right(verb, resource) for resource in beside for verb in ("create", "patch")),
        *given,
        *replacing(spec),
        Right("list", kind, need="look"),
        Right("list", EVENTS, need="look"),
        Right("get", PODS, "log", "look"),
        *(Right(verb, PODS, "exec", "look") for verb in ("get", "create")),
    )
    kept: dict[tuple[str, str], Right] = {}
    for one in found:  # of two equal rights the first counts, which a submission needs
        kept.setdefault((one.verb, one.word), one)
    return tuple(kept.values())


def looking(kinds: Sequence[Resource]) -> tuple[Right, ...]:
    """The rights to find the jobs of these kinds in a namespace, and to look at them."""
    return (
        *(Right(verb, kind, need="look") for kind in kinds for verb in ("get", "list")),
        Right("get", CONFIG_MAPS, need="look"),
        *(Right("list", resource, need="look") for resource in (PODS, EVENTS)),
        Right("get", PODS, "log", "look"),
        *(Right(verb, PODS, "exec", "look") for verb in ("get", "create")),
    )


def replacing(spec: KubernetesSpec) -> tuple[Right, ...]:
    """The additional rights to replace a job that has ended."""
    kind = JOB_KINDS[spec.kind].resource
    of_pods = ("list", "watch", "deletecollection")
    return (
        *(Right(verb, kind, need="again") for verb in ("list", "watch", "delete")),
        *(Right(verb, PODS, need="again") for verb in of_pods),
    )


def missing(api: ApiReader, rights: Sequence[Right], namespace: str | None) -> list[Right]:
    """The `rights` that the user does not have in `namespace` (None: in the whole cluster); empty
    if the user may not ask."""
    found = []
    for right in rights:
        try:
            if not _may(api, right, namespace):
                found.append(right)
        except Unanswered:
            raise
        except BackendError:
            return []
    return found


def _may(api: ApiReader, right: Right, namespace: str | None) -> bool:
    about = {"verb": right.verb, "group": right.resource.group, "resource": right.resource.plural}
    about |= {"subresource": right.sub} if right.sub else {}
    about |= {"namespace": namespace} if namespace else {}
    said = api.create(
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": about},
        },
        namespace or "",
    )
    return bool(lookup(said, ("status", "allowed"), False))


def require(api: ApiReader, rights: Sequence[Right], namespace: str, what: str) -> None:
    """Raises Forbidden with all missing `rights`. `what` says what is not done because of this."""
    if lacking := missing(api, rights, namespace):
        raise refused(api, lacking, namespace, what)


def refused(api: ApiReader, lacking: Sequence[Right], namespace: str, what: str) -> Forbidden:
    """The error with all missing rights, and how an administrator adds them."""
    user = user_of(api, lacking, namespace)
    lines = "\n".join(f"    - {rule}" for rule in rules_of(lacking))
    commands = "\n".join(f"    {line}" for line in commands_of(lacking, namespace, user))
    return Forbidden(
        f"{user or 'you'} may not {listing(lacking)} in namespace {namespace}: {what}",
        fix=f"an administrator adds these rules to your Role in {namespace}\n{lines}\n"
        f"\n  or runs\n{commands}\n"
        f"  or binds you to the Role {ROLE} of manifests/base, which has all of them",
        user=user or "",
    )


def commands_of(rights: Sequence[Right], namespace: str, user: str | None) -> Iterator[str]:
    """The commands that grant `rights`, with one Role for each set of verbs."""
    for verbs, some in _by_verbs(rights).items():
        words = ",".join(dict.fromkeys(right.word for right in some))
        plural = some[0].resource.plural + (f"-{some[0].sub}" if some[0].sub else "")
        role = f"ndctl-{'-'.join(verbs)}-{plural}"
        yield (
            f"kubectl create role {role} --verb={','.join(verbs)} --resource={words} -n {namespace}"
        )
        yield (
            f"kubectl create rolebinding {role} --role={role} --user={user or YOU} -n {namespace}"
        )


def _by_verbs(rights: Sequence[Right]) -> dict[tuple[str, ...], list[Right]]:
    """The rights, grouped by the set of verbs that their resource needs."""
    verbs: dict[str, list[str]] = {}
    for right in rights:
        verbs.setdefault(right.word, []).append(right.verb)
    found: dict[tuple[str, ...], list[Right]] = {}
    for right in rights:
        found.setdefault(tuple(verbs[right.word]), []).append(right)
    return found


def user_of(api: ApiReader, lacking: Sequence[Right], namespace: str) -> str | None:
    """The user's name at the API server. All versions put it into a refusal, so a forbidden request
    is sent without effect (`dryRun`)."""
    for right in lacking:
        whole = right.verb in ("create", "list", "watch", "deletecollection") and not right.sub
        path = right.resource.path(namespace, "" if whole else "ndctl", right.sub)
        said = api.refusal(right.verb, path)
        if isinstance(said, Forbidden) and said.user:
            return said.user
    return None


def listing(rights: Sequence[Right]) -> str:
    """Text such as `create/patch secrets, list events`."""
    verbs: dict[str, list[str]] = {}
    for right in rights:
        verbs.setdefault(right.word, []).append(right.verb)
    return ", ".join(f"{'/'.join(some)} {word}" for word, some in verbs.items())


def rules_of(rights: Sequence[Right]) -> list[str]:
    """Rules of a Role, each as one line of YAML."""
    resources: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for right in dict.fromkeys(replace(one, verb="", need="submit") for one in rights):
        same = (one for one in rights if (one.resource, one.sub) == (right.resource, right.sub))
        verbs = tuple(dict.fromkeys(one.verb for one in same))
        name = right.resource.plural + (f"/{right.sub}" if right.sub else "")
        resources.setdefault((right.resource.group, verbs), []).append(name)
    return [
        f'{{apiGroups: ["{group}"], resources: [{", ".join(names)}], verbs: [{", ".join(verbs)}]}}'
        for (group, verbs), names in resources.items()
    ]
