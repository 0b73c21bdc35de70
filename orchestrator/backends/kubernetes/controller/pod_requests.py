"""Parses the requests that the pods of a job send to the controller. Pure.

The pods may write one object, ConfigMap JOB-launch, which cannot change what pods run. Its
annotations are the requests:

    ndctl.dev/avoid: node-7,node-9
    ndctl.dev/end-pods: job-node-0-1-x7k2p/9f0d2c9e-8f5b-4f0e-9d55-0b6f1f3e6c11
    ndctl.dev/gang-restart: {"by": "job-master-0", "at": 1763800000, "exclude": ["node-7"]}

The controller has many rights, and it does not trust the program that sends the requests. So this
grammar is all that can be requested: names of nodes, pods of this job, and one JSON object with
these three keys. A request that violates it is refused as a whole.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from orchestrator.backends.kubernetes.observe.object_fields import annotations_of
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import Object, lookup, name_of
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.contract.visible import visible

MOST_NODES = 100
"""Largest number of nodes that one job can exclude. For a JobSet the controller creates a pod on
each."""
MOST_PODS = 10_000
MOST_TEXT = 16 << 10
"""Most characters of a gang restart."""
NODE = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
POD = re.compile(r"([a-z0-9][-a-z0-9.]{0,252})/([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
BY = re.compile(r"[-A-Za-z0-9_.@:]{1,253}")
SOMEBODY = "somebody"


class InvalidRequest(ValueError):
    """The request does not follow the grammar."""


class GangRestart(Struct, frozen=True, kw_only=True):
    by: str = SOMEBODY
    at: float | None = None
    """Unix seconds, by the clock of the requesting program. It makes two requests different."""
    exclude: tuple[str, ...] = ()
    """Nodes that new pods must avoid."""

    def text(self) -> str:
        return json.dumps({"by": self.by, "at": self.at, "exclude": list(self.exclude)})


class PodRequests(Struct, frozen=True, kw_only=True):
    """The requests of one job's pods."""

    avoid: tuple[str, ...] = ()
    end: tuple[tuple[str, str], ...] = ()
    """Name and uid of each pod."""
    restart: GangRestart | None = None
    """None: no request, or it is already done."""
    digest: str = ""
    """Digest of the text of `restart`, which is noted on the job when the restart is done."""
    refused: tuple[str, ...] = ()
    """Rejected requests, with the reason."""

    @property
    def nodes(self) -> frozenset[str]:
        """All nodes that new pods must avoid."""
        return frozenset(self.avoid) | frozenset(self.restart.exclude if self.restart else ())


def requests_of(kind: Kind, job: Object, config_map: Object | None) -> PodRequests:
    """The requests of the pods of `job` in `config_map` JOB-launch.

    The ConfigMap must belong to this job, because an earlier job of that name may have left one.
    """
    # Its requests are about nodes and pods of the earlier job.
    if config_map is None or not belongs_to(config_map, job):
        return PodRequests()
    notes = annotations_of(config_map)
    refused: list[str] = []
    found: dict[str, object] = {}
    text = notes.get(names.GANG_ANNOTATION)
    done = annotations_of(job).get(names.RESTARTED_ANNOTATION)
    # Each request is parsed on its own: a malformed one must not block the others.
    try:
        found["avoid"] = nodes_in(notes.get(names.AVOID_ANNOTATION, ""))
    except InvalidRequest as exc:
        refused.append(f"{names.AVOID_ANNOTATION}: {exc}")
    try:
        found["end"] = pods_in(kind, name_of(job), notes.get(names.END_ANNOTATION, ""))
    except InvalidRequest as exc:
        refused.append(f"{names.END_ANNOTATION}: {exc}")
    # The controller may not remove the request, so the digest on the job shows that it is done.
    if text is not None and digest_of(text) != done:
        try:
            found |= {"restart": restart_in(text), "digest": digest_of(text)}
        except InvalidRequest as exc:
            refused.append(f"{names.GANG_ANNOTATION}: {exc}")
    return PodRequests(**found, refused=tuple(refused))  # type: ignore[arg-type]


def belongs_to(config_map: Object, job: Object) -> bool:
    """Whether `job` owns the ConfigMap. `submit` sets the owner, or else the leader's pod."""
    uid = str(lookup(job, ("metadata", "uid"), ""))
    owners = lookup(config_map, ("metadata", "ownerReferences"), ())
    return any(one.get("uid") == uid for one in owners) and bool(uid)


def nodes_in(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of node names."""
    return _checked_nodes(tuple(filter(None, text.split(","))))


def _checked_nodes(found: Sequence[str]) -> tuple[str, ...]:
    if len(found) > MOST_NODES:
        raise InvalidRequest(f"{len(found)} nodes; a job may avoid {MOST_NODES} at most")
    for name in found:
        if not isinstance(name, str) or NODE.fullmatch(name) is None:
            raise InvalidRequest(f"{_shown(name)} is not a node name")
    return tuple(found)


def pods_in(kind: Kind, job: str, text: str) -> tuple[tuple[str, str], ...]:
    """Parses a comma-separated list of NAME/UID of pods of this job."""
    words = text.split(",") if text else []
    if len(words) > MOST_PODS:
        raise InvalidRequest(f"{len(words)} pods; {MOST_PODS} at most")
    found = []
    for word in words:
        match = POD.fullmatch(word)
        if match is None:
            raise InvalidRequest(f"{_shown(word)} is not POD/UID")
        # A program in a pod must not be able to delete pods of another job.
        if not names.is_pod_of(kind, job, match[1]):
            raise InvalidRequest(f"{match[1]} is not a pod of {job}")
        found.append((match[1], match[2]))
    return tuple(found)


def restart_in(text: str) -> GangRestart:
    try:
        said = read_json(text, most=MOST_TEXT)
    except ValueError as exc:
        raise InvalidRequest(f"{_shown(text)} is not JSON: {exc}") from exc
    if not isinstance(said, Mapping) or not {*said} <= {"by", "at", "exclude"}:
        raise InvalidRequest(f"{_shown(text)} is not a JSON object with only by, at and exclude")
    by, at, exclude = said.get("by", SOMEBODY), said.get("at"), said.get("exclude", [])
    if not isinstance(by, str) or BY.fullmatch(by) is None:
        raise InvalidRequest(f"by: {_shown(by)} is not the name of a pod or a person")
    # In Python a bool is an int, so it is excluded by name.
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float)):
        raise InvalidRequest(f"at: {_shown(at)} is not a number of seconds")
    if not isinstance(exclude, list):
        raise InvalidRequest(f"exclude: {_shown(exclude)} is not a list of nodes")
    return GangRestart(by=by, at=at, exclude=_checked_nodes(exclude))


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shown(value: object) -> str:
    """The first characters of untrusted text."""
    text = visible(repr(value), keep="")
    return text if len(text) <= 60 else f"{text[:57]}..."


def number_in(item: Object, annotation: str) -> int:
    """The value of a counter annotation; 0 if unset."""
    said = annotations_of(item).get(annotation, "")
    # The annotation may hold any text. `int` would also accept signs, spaces and digits of other
    # scripts, and it is slow for very long text.
    return int(said) if said.isascii() and said.isdigit() and len(said) < 10 else 0


def excluded_of(job: Object) -> tuple[str, ...]:
    """Nodes that the controller excludes for new pods of the job."""
    said = annotations_of(job).get(names.EXCLUDED_ANNOTATION, "")
    return tuple(filter(None, said.split(",")))
