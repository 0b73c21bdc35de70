"""The actions of the controller: a few kinds of requests, each with a reason. Pure.

Each names the observed uid or resourceVersion of its object. So the API server refuses an action
that comes late, twice, or from a controller that is no longer the leader.
"""

from collections.abc import Mapping
from typing import Any, Self

from msgspec import Struct

from orchestrator.backends.kubernetes.resources import Object, Resource, name_of


class Ref(Struct, frozen=True, kw_only=True):
    resource: Resource
    namespace: str
    name: str
    uid: str
    version: str

    @classmethod
    def of(cls, resource: Resource, item: Object) -> Self:
        metadata = item["metadata"]
        return cls(
            resource=resource,
            namespace=metadata.get("namespace", ""),
            name=name_of(item),
            uid=str(metadata.get("uid", "")),
            version=str(metadata.get("resourceVersion", "")),
        )

    def __str__(self) -> str:
        place = f"{self.namespace}/" if self.namespace else ""
        return f"{self.resource.kind} {place}{self.name}"


class Patch(Struct, frozen=True, kw_only=True):
    """A merge patch of exactly this version."""

    what: Ref
    change: Mapping[str, Any]
    does: str
    """Verb and object, for example `suspend PyTorchJob ns/job`."""
    reason: str


class Create(Struct, frozen=True, kw_only=True):
    what: Ref
    """The object to create, with the uid of its owner."""
    item: Object
    reason: str

    @property
    def does(self) -> str:
        return f"create {self.what}"


class Delete(Struct, frozen=True, kw_only=True):
    what: Ref
    reason: str
    grace_s: int | None = None
    """None: the object's default; 0: by force."""
    status: Mapping[str, Any] | None = None
    """The status to write before the pod is deleted."""

    @property
    def does(self) -> str:
        return f"delete {self.what}" + (" by force" if self.grace_s == 0 else "")


Action = Patch | Create | Delete
