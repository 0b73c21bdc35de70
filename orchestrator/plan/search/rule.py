"""The types of the table in `rules.py`: `Rule`, its input `Case` and its result `Broken`."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, Self

from msgspec import Struct

from orchestrator.contract.mesh import AXES, Mesh
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.inventory.hosts import Inventory
from orchestrator.plan.model.shape import ModelShape
from orchestrator.plan.search.edits import value_at

Blocks = Sequence[int]
"""Hosts of each NVLink block, the largest first, as in `Fabric.blocks`."""


class Hosts(Struct, frozen=True, dict=True):
    """The properties of the hosts that the rules read."""

    devices: int
    """Devices per host that the job asks for."""
    blocks: Blocks
    inventory: Inventory | None = None
    """None inside a search: the rules of scope `job` were checked before it started."""

    @classmethod
    def of(cls, spec: JobSpec, inventory: Inventory) -> Self:
        devices = spec.cluster.gpus_per_host
        return cls(devices, inventory.blocks(devices), inventory)

    @cached_property
    def usable(self) -> int:
        """Free hosts with enough devices; needs an inventory."""
        assert self.inventory is not None
        return len(self.inventory.with_devices(self.devices))


class Request(NamedTuple):
    """A job that needs a mesh. All meshes that a search compares share one request."""

    spec: JobSpec
    shape: ModelShape
    hosts: Hosts


class Case(NamedTuple):
    """One mesh with one pipeline for one request: the input of a rule."""

    spec: JobSpec
    shape: ModelShape
    hosts: Hosts
    mesh: Mesh
    pipeline: PipelineSpec


class Broken(NamedTuple):
    """Why a rule refuses."""

    limit: str
    """Depends on the spec, the model and the hosts, not on the mesh: the search counts the meshes
    that break the same limit together."""
    found: str = ""
    """The values of this mesh, appended to the limit when a single mesh is refused."""


class Rule(Struct, frozen=True, kw_only=True):
    name: str
    scope: Literal["job", "mesh", "schedule"]
    """`job`: the same answer for every mesh. `mesh`: depends on the degrees. `schedule`: depends on
    the pipeline schedule too, so a mesh is refused only if every schedule that `auto` may choose
    breaks it."""
    reads: tuple[str, ...]
    """Paths in the spec. A refusal shows the value of the first."""
    axis: str = ""
    """The degrees by which `ndctl plan` lists the meshes that break it; empty for scope `job`."""
    check: Callable[[Case], Broken | None]
    """Returns None if the rule holds."""
    fix: str
    """Shown if no changed spec with a plan was found."""


class Refusal(Struct, frozen=True):
    """One rule that a mesh breaks, as shown to the user."""

    rule: str
    value: str
    limit: str
    fix: str

    def __str__(self) -> str:
        return f"{self.value}: {self.limit} [{self.rule}]"


def refusal_of(rule: Rule, broken: Broken, case: Case) -> Refusal:
    path = rule.reads[0]
    value = _value(case, path)
    shown = path if value is None else f"{path}={value}"
    return Refusal(rule=rule.name, value=shown, limit=broken.limit + broken.found, fix=rule.fix)


def _value(case: Case, path: str) -> str | None:
    """The refused value; for `auto`, the mesh's degree; None for a section of the spec."""
    asked = value_at(case.spec, path)
    section, _, key = path.rpartition(".")
    if section == "parallel" and key in AXES:
        degree = getattr(case.mesh, key)
        return f"{degree} (auto)" if asked == "auto" else str(degree)
    if isinstance(asked, bool):
        return str(asked).lower()
    return str(asked) if isinstance(asked, int | str) else None
