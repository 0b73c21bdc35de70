"""What the API server says instead of an answer, as errors that say what to type. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.backends.kubernetes.resources import JOB_KINDS
from orchestrator.contract.read_json import read_json
from orchestrator.errors import BackendError, Unanswered

FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)"'
    r' in API group "(?P<group>[^"]*)"(?: in the namespace "(?P<namespace>[^"]+)")?'
)
ACCOUNT = re.compile(r"system:serviceaccount:(?P<namespace>[^:]+):(?P<name>.+)")
WORDLESS = re.compile(r'(?P<resource>[a-z]+)(?:\.(?P<group>\S+))? "[^"]*" is forbidden:\s*')
"""How an API server refuses an apply to who may patch, where it would have to create: without a
reason, and without a name."""
JSON = "application/json"
GRANT = re.compile(
    r'user "(?P<user>[^"]+)".* is attempting to grant RBAC permissions not currently held:'
    r"\s*(?P<rules>.*)",
    re.DOTALL,
)
"""RBAC's own wall: a person gives to a job's pods only what that person has."""
YOU = "YOU"
"""Stands for a name that is not known."""
AGAIN = (429, 500, 502, 503, 504)
UNTYPED = "failed to create typed patch object"
"""How a server-side apply is refused whose object has a field that the schema lacks: as an internal
error, 500, in every version so far (kubernetes issue 139253)."""


class Missing(BackendError):
    """There is no such object, or no such kind of object."""


class Forbidden(BackendError):
    """RBAC gives no right to it."""

    def __init__(self, message: str, *, fix: str = "", user: str = "") -> None:
        """`user`: as the API server knows us; empty where it does not say."""
        super().__init__(message, fix=fix)
        self.user = user


class Conflict(BackendError):
    """The object exists already, or has changed meanwhile."""


class Expired(BackendError):
    """Too old a resourceVersion: list anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was asked of the API server."""

    verb: str
    """As RBAC has it."""
    path: str
    accept: str = JSON
    """In which form the answer is wanted."""

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


def is_undecided(status: int, body: bytes) -> bool:
    """The same request may well be answered in a moment."""
    return status in AGAIN and UNTYPED.encode() not in body


def refusal(asked: Asked, status: int, body: bytes) -> BackendError:
    """The error that an answer with `status` is."""
    said = _status(body)
    message = str(said.get("message") or body[:300].decode(errors="replace").strip() or status)
    match status:
        case 401:
            return BackendError(
                f"the API server does not know you: {message}",
                fix="log in to the cluster again; `kubectl auth can-i --list` shows whether it"
                " worked",
            )
        case 403:
            return _forbidden(asked, message)
        case 404:
            return _missing(asked, said, message)
        case 409:
            return Conflict(f"the API server refuses to {asked}: {message}", fix="try it again")
        case 410:
            return Expired(message)
        case _ if is_undecided(status, body):
            return Unanswered(
                f"the API server does not answer {asked}: {status}, {message}",
                fix="try again in a moment",
            )
    return BackendError(
        f"the API server refuses to {asked}: {message}",
        fix="change the key of cluster.kubernetes that it names; `ndctl render` shows the objects",
    )


def _status(body: bytes) -> Mapping[str, Any]:
    try:
        said = read_json(body)
    except ValueError:
        return {}
    return said if isinstance(said, Mapping) else {}


def _forbidden(asked: Asked, message: str) -> BackendError:
    """No right to it, or the right but a quota or a policy of the namespace against it."""
    if asked.verb == "patch" and (wordless := WORDLESS.fullmatch(message)) is not None:
        place = re.search("/namespaces/([^/]+)/", asked.path)
        space = f' in the namespace "{place[1]}"' if place else ""
        message = f'User "{YOU}" cannot create resource "{wordless["resource"]}" in API group' + (
            f' "{wordless["group"] or ""}"{space}'
        )
    found = FORBIDDEN.search(message)
    if found is not None:
        return Forbidden(
            f"{found['user']} may not {found['verb']} {_word(found)}{_where(found)}",
            fix="an administrator gives that right with\n" + role_lines(found),
            user="" if found["user"] == YOU else found["user"],
        )
    if (grant := GRANT.search(message)) is not None:
        return Forbidden(
            f"{grant['user']} may not give the job's pods rights that {grant['user']} does not"
            f" have: {' '.join(grant['rules'].split())}",
            fix="an administrator gives you those rights as well (the Role ndctl-user of"
            " manifests/base has all of them), or name an account that is there in"
            " cluster.kubernetes.service_account",
            user=grant["user"],
        )
    if "exceeded quota" in message:
        return BackendError(
            f"a quota of the namespace refuses it: {message}",
            fix="`kubectl describe resourcequota` shows what is used; ask for less, or for more"
            " quota",
        )
    return BackendError(
        f"the cluster refuses it: {message}",
        fix="change the key of cluster.kubernetes that it names; `ndctl render` shows the objects",
    )


def _word(found: re.Match[str]) -> str:
    resource, _, sub = found["resource"].partition("/")
    group = f".{found['group']}" if found["group"] else ""
    return resource + group + (f"/{sub}" if sub else "")


def _where(found: re.Match[str]) -> str:
    return f" in namespace {found['namespace']}" if found["namespace"] else ""


def role_lines(found: re.Match[str]) -> str:
    """What gives the right, to be typed as it is."""
    role = f"ndctl-{found['verb']}-{found['resource'].replace('/', '-')}"
    # What can be looked at is looked at in all three ways; what changes something is given alone.
    verb = "get,list,watch" if found["verb"] in ("get", "list", "watch") else found["verb"]
    account = ACCOUNT.fullmatch(found["user"])
    whom = f"--user={found['user']}"
    if account is not None:
        whom = f"--serviceaccount={account['namespace']}:{account['name']}"
    cluster, space = ("", f" -n {found['namespace']}") if found["namespace"] else ("cluster", "")
    return (
        f"    kubectl create {cluster}role {role} --verb={verb} --resource={_word(found)}{space}\n"
        f"    kubectl create {cluster}rolebinding {role} --{cluster}role={role} {whom}{space}"
    )


def _missing(asked: Asked, said: Mapping[str, Any], message: str) -> BackendError:
    details = said.get("details")
    named = bool(details.get("name")) if isinstance(details, Mapping) else False
    for kind in JOB_KINDS.values():
        resource = kind.resource
        if not named and f"/apis/{resource.group}/" in asked.path:
            return Missing(
                f"the cluster has no {resource.kind} ({resource.word}, version"
                f" {resource.version}): {kind.operator} is not installed",
                fix=f"an administrator installs it with\n    {kind.install}\n  or take another"
                f" cluster.kubernetes.kind than {resource.kind.lower()}",
            )
    namespace = re.search(r'namespaces "([^"]+)" not found', message)
    if namespace is not None:
        return Missing(
            f"there is no namespace {namespace[1]}",
            fix=f"`kubectl create namespace {namespace[1]}`, or set cluster.kubernetes.namespace",
        )
    return Missing(message, fix="`kubectl get` shows what there is")
