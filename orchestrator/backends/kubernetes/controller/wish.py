"""A gang restart, as it is asked for on the job's own object: new pods in place of all. Pure.

ndctl.dev/gang-restart: '{"by": "job-master-0", "at": 1763800000, "exclude": ["node-7"]}'
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import Object, lookup
from orchestrator.contract.read_json import read_json

SOMEBODY = "somebody"


@dataclass(frozen=True, slots=True, kw_only=True)
class GangRestart:
    by: str = SOMEBODY
    at: float | None = None
    """Unix seconds, by the clock of who asked; for people alone."""
    exclude: tuple[str, ...] = ()
    """Nodes that the next pods shall not have."""

    def text(self) -> str:
        return json.dumps({"by": self.by, "at": self.at, "exclude": list(self.exclude)})


def wish_of(job: Object) -> GangRestart | None:
    """None where nobody asks. What a person wrote by hand may be anything: it asks as well."""
    said = annotations_of(job).get(names.GANG_ANNOTATION)
    if said is None:
        return None
    try:
        found = read_json(said)
    except ValueError:
        return GangRestart()
    if not isinstance(found, Mapping):
        return GangRestart()
    at, exclude = found.get("at"), found.get("exclude")
    return GangRestart(
        by=str(found.get("by") or SOMEBODY),
        at=float(at) if isinstance(at, int | float) else None,
        exclude=tuple(one for one in exclude if isinstance(one, str) and one)
        if isinstance(exclude, Sequence) and not isinstance(exclude, str)
        else (),
    )


def annotations_of(item: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = lookup(item, ("metadata", "annotations"), {})
    return found


def requeues_of(job: Object) -> int:
    said = annotations_of(job).get(names.REQUEUES_ANNOTATION, "")
    return int(said) if said.isascii() and said.isdigit() else 0


def excluded_of(job: Object) -> tuple[str, ...]:
    """Nodes that the job's leader has left out so far."""
    said = annotations_of(job).get(names.EXCLUDED_ANNOTATION, "")
    return tuple(filter(None, said.split(",")))


def excluding(job: Object, hosts: Sequence[str]) -> dict[str, str]:
    """The annotation with `hosts` besides; nothing where it stays as it is."""
    every = sorted({*excluded_of(job), *hosts})
    if every == sorted(excluded_of(job)):
        return {}
    return {names.EXCLUDED_ANNOTATION: ",".join(every)}
