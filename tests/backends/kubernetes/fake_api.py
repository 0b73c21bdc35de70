"""A fake API server with the objects that a test gives it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.backends.kubernetes.api.api_errors import Expired, Forbidden, Missing
from orchestrator.backends.kubernetes.api.client import Listed
from orchestrator.backends.kubernetes.resources import Object, Resource
from orchestrator.errors import BackendError


@dataclass
class FakeApi:
    objects: Mapping[str, Sequence[Object]] = field(default_factory=dict)
    """Plural of the kind -> objects."""
    paths: Mapping[str, Any] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    """Forbidden requests: `VERB PLURAL` in a namespace, `VERB PLURAL *` in the whole cluster."""
    expired: int = 0
    """Number of lists that fail with an expired page before one succeeds."""
    context: str = "prod"
    namespace: str = "team-a"
    server: str = "https://10.0.0.1:6443"
    asked: list[str] = field(default_factory=list)
    refusals: Mapping[str, BackendError] = field(default_factory=dict)
    """Kind -> error of a dry run."""
    warnings: tuple[str, ...] = ()
    tried: list[Object] = field(default_factory=list)
    """Objects of dry runs."""

    def read(self, path: str) -> Any:
        found = self.paths.get(path)
        if isinstance(found, BackendError):
            raise found
        if found is None:
            raise Missing(f"nothing at {path}")
        return found

    def _refuse(self, verb: str, resource: Resource, namespace: str | None) -> None:
        what = f"{verb} {resource.plural}" + ("" if namespace else " *")
        self.asked.append(what)
        if what in self.refused:
            raise Forbidden(f"ada may not {verb} {resource.plural}", fix="ask")

    def list(
        self, resource: Resource, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> Listed:
        self._refuse("list", resource, namespace)
        if self.expired:
            self.expired -= 1
            raise Expired("too old")
        items = tuple(
            item
            for item in self.objects.get(resource.plural, ())
            if namespace in (None, item["metadata"].get("namespace"))
        )
        return Listed(items=items, version="1")

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        self._refuse("get", resource, namespace)
        there = self.objects.get(resource.plural, ())
        return next((one for one in there if one["metadata"]["name"] == name), None)

    def apply(self, item: Object, namespace: str, *, dry_run: bool = False) -> Object:
        assert dry_run, "a check must not create objects"
        self.tried.append(item)
        refusal = self.refusals.get(item["kind"])
        if refusal is not None:
            raise refusal
        return item

    def create(self, item: Object, namespace: str) -> Object:
        about = item["spec"]["resourceAttributes"]
        what = f"{about['verb']} {about['resource']}"
        what += f"/{about['subresource']}" if "subresource" in about else ""
        what += "" if "namespace" in about else " *"
        return {"status": {"allowed": what not in self.refused}}

    def refusal(self, verb: str, path: str) -> BackendError | None:
        self.asked.append(f"{verb} {path}")
        return Forbidden(f"ada may not {verb} {path}", user="ada")
