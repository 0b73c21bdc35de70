"""API server errors as BackendErrors with a fix. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from orchestrator.backends.kubernetes.resources import ETCD_BYTES, JOB_KINDS, TO_SHORTEN
from orchestrator.contract.read_json import read_json
from orchestrator.errors import BackendError, Unanswered

FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]+)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)"'
    r' in API group "(?P<group>[^"]*)"(?: in the namespace "(?P<namespace>[^"]+)")?'
)
ACCOUNT = re.compile(r"system:serviceaccount:(?P<namespace>[^:]+):(?P<name>.+)")
WORDLESS = re.compile(r'(?P<resource>[a-z]+)(?:\.(?P<group>\S+))? "[^"]*" is forbidden:\s*')
"""The refusal of an apply that would create an object, for a user who may only patch. It contains
neither a reason nor the user's name."""
JSON = "application/json"
GRANT = re.compile(
    r'user "(?P<user>[^"]+)".* is attempting to grant RBAC permissions not currently held:'
    r"\s*(?P<rules>.*)",
    re.DOTALL,
)
"""RBAC: a person can grant a job's pods only rights that the person has."""
YOU = "YOU"
"""Placeholder for an unknown user name."""
ANONYMOUS = 'User "system:anonymous"'
LOG_IN = "log in to the cluster again; `kubectl auth can-i --list` shows if it worked"
AGAIN = (429, 500, 502, 503, 504)
TOO_LARGE = re.compile(
    "trying to send message larger than max|request is too large|request entity too large",
    re.IGNORECASE,
)
"""The refusals of an object by the connection to etcd, by etcd (both as internal error 500), and by
the API server (413). A retry cannot succeed."""
UNTYPED = "failed to create typed patch object"
"""The refusal of a server-side apply with a field that is not in the schema. All versions so far
return it as internal error 500 (kubernetes issue 139253), although a retry cannot succeed."""

RUNTIME_FIRST = "must be created before the TrainJob is created"
"""Trainer's webhook says this of a TrainJob whose runtime it does not find."""


class Missing(BackendError):
    """The object, or its kind, does not exist."""


class Forbidden(BackendError):
    """RBAC denies the request."""

    def __init__(self, message: str, *, fix: str = "", user: str = "") -> None:
        """`user`: our name at the API server; empty if unknown."""
        super().__init__(message, fix=fix)
        self.user = user


class Conflict(BackendError):
    """The object exists already, or changed meanwhile."""


class Expired(BackendError):
    """The resourceVersion is too old: list again."""


class RuntimeUnseen(BackendError):
    """Trainer's webhook does not see the runtime of a TrainJob. The runtime may exist already,
    because the webhook reads a cache."""


class ApiRequest(Struct, frozen=True, kw_only=True):
    """One request to the API server."""

    verb: str
    """The RBAC verb."""
    path: str
    accept: str = JSON
    """The requested content type of the answer."""

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


def is_undecided(status: int, body: bytes) -> bool:
    """Whether a retry of the same request may succeed."""
    said = body.decode(errors="replace")
    return status in AGAIN and UNTYPED not in said and not TOO_LARGE.search(said)


def refusal(asked: ApiRequest, status: int, body: bytes) -> BackendError:
    """The error for an answer with `status`."""
    said = _status(body)
    message = str(said.get("message") or body[:300].decode(errors="replace").strip() or status)
    if RUNTIME_FIRST in message:
        return RuntimeUnseen(f"the cluster rejected it: {message}", fix="try again in a moment")
    match status:
        case 401:
            return BackendError(f"the API server rejected your credentials: {message}", fix=LOG_IN)
        # It knows no user, so no right is missing: granting one would grant it to everybody.
        case 403 if ANONYMOUS in message:
            return BackendError(f"you are not logged in to the cluster: {message}", fix=LOG_IN)
        case 403:
            return _forbidden(asked, message)
        case 404:
            return _missing(asked, said, message)
        case 409:
            return Conflict(f"the API server refused to {asked}: {message}", fix="try it again")
        case 410:
            return Expired(message)
        case _ if TOO_LARGE.search(message):
            return BackendError(
                f"the API server refused to {asked}: {message}",
                fix=f"etcd takes at most {ETCD_BYTES:,} bytes by default: {TO_SHORTEN}",
            )
        case _ if is_undecided(status, body):
            return Unanswered(
                f"the API server failed to answer {asked}: {status}, {message}",
                fix="try again in a moment",
            )
    return BackendError(
        f"the API server refused to {asked}: {message}",
        fix="fix the key of cluster.kubernetes that it names; `ndctl render` shows the objects",
    )


def _status(body: bytes) -> Mapping[str, Any]:
    try:
        said = read_json(body)
    except ValueError:
        return {}
    return said if isinstance(said, Mapping) else {}


def _forbidden(asked: ApiRequest, message: str) -> BackendError:
    """Status 403: a missing right, or a quota or policy of the namespace."""
    # Rewrite it in the words of the usual refusal, so that the code below can name the right to
    # grant.
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
            fix="an administrator grants it with\n" + role_lines(found),
            user="" if found["user"] == YOU else found["user"],
        )
    # Kubernetes lets a person pass on only rights that the person has.
    if (grant := GRANT.search(message)) is not None:
        return Forbidden(
            f"{grant['user']} may not grant the job's pods rights that {grant['user']} does not"
            f" have: {' '.join(grant['rules'].split())}",
            fix="an administrator grants you those rights as well (the Role ndctl-user of"
            " manifests/base has all of them), or set an existing account in"
            " cluster.kubernetes.service_account",
            user=grant["user"],
        )
    # A quota answers 403 too, but a right would not help.
    if "exceeded quota" in message:
        return BackendError(
            f"a quota of the namespace rejects it: {message}",
            fix="`kubectl describe resourcequota` shows its usage; request less, or get more quota",
        )
    return BackendError(
        f"the cluster rejected it: {message}",
        fix="fix the key of cluster.kubernetes that it names; `ndctl render` shows the objects",
    )


def _word(found: re.Match[str]) -> str:
    resource, _, sub = found["resource"].partition("/")
    group = f".{found['group']}" if found["group"] else ""
    return resource + group + (f"/{sub}" if sub else "")


def _where(found: re.Match[str]) -> str:
    return f" in namespace {found['namespace']}" if found["namespace"] else ""


def role_lines(found: re.Match[str]) -> str:
    """The commands that grant the right."""
    role = f"ndctl-{found['verb']}-{found['resource'].replace('/', '-')}"
    # Reading is granted with all three read verbs; a verb that changes objects is granted alone.
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


def _missing(asked: ApiRequest, said: Mapping[str, Any], message: str) -> BackendError:
    details = said.get("details")
    named = bool(details.get("name")) if isinstance(details, Mapping) else False
    for kind in JOB_KINDS.values():
        resource = kind.resource
        # A 404 without the name of an object is about the whole kind: the path is unknown.
        if not named and f"/apis/{resource.group}/" in asked.path:
            return Missing(
                f"the cluster has no {resource.kind} ({resource.word}, version"
                f" {resource.version}): {kind.operator} is not installed",
                fix=f"an administrator installs it with\n    {kind.install}\n  or use another"
                f" cluster.kubernetes.kind than {resource.kind.lower()}",
            )
    namespace = re.search(r'namespaces "([^"]+)" not found', message)
    if namespace is not None:
        return Missing(
            f"there is no namespace {namespace[1]}",
            fix=f"`kubectl create namespace {namespace[1]}`, or set cluster.kubernetes.namespace",
        )
    return Missing(message, fix="`kubectl get` lists existing objects")
