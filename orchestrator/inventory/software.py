"""Training software by name, whose speed can be planned instead of that of the bundled trainer."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.codec import Problem, nearest
from orchestrator.errors import PlanError
from orchestrator.inventory.hosts import Inventory
from orchestrator.inventory.profile import Profile
from orchestrator.inventory.profiles import calibration_table

BUNDLED = "torch"
"""The software that the bundled trainer is."""
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("ndctl", "torchtitan", "fsdp", "fsdp2", "pytorch"), BUNDLED),
    **dict.fromkeys(
        ("nemo", "megatron-lm", "megatron-core", "mcore", "transformer-engine"), "megatron"
    ),
    **dict.fromkeys(("user-buffers", "userbuffers", "tp-comm-overlap"), "megatron-tp-overlap"),
}
"""What people call it."""


class SoftwareBasis(Struct, frozen=True, kw_only=True):
    """How published runs of a training software are planned."""

    name: str
    runs: int
    sources: int
    mean_error: float
    """Of planned relative to published speeds; 0.07 is 7 %."""
    bias: float
    """Positive if plans promise too much."""
    worst: float


_BASIS = tuple(key for key in SoftwareBasis.__struct_fields__ if key != "name")


def software_basis(name: str) -> SoftwareBasis:
    known = calibration_table("software")[name]
    return SoftwareBasis(name=name, **{key: known[key] for key in _BASIS})


@cache
def software_names() -> tuple[str, ...]:
    return tuple(calibration_table("software"))


def software_constants(name: str) -> Mapping[str, Any]:
    """The constants of a calibration that differ from those of the bundled trainer."""
    known = calibration_table("software")[name]
    base = software_constants(known["like"]) if "like" in known else {}
    return {**base, **known["constants"]}


def has_even_stages(name: str) -> bool:
    return bool(software_constants(name).get("even_stages"))


def unknown_software(name: object) -> Problem:
    """What is wrong with a name that no software has."""
    known = software_names()
    near = OTHER_NAMES.get(str(name).lower()) or nearest(name, known)
    fix = f"did you mean {near}?" if near else f"without it the plan is for {BUNDLED}"
    return Problem(path="software", value=name, limit=f"one of {', '.join(known)}", fix=fix)


def for_software(profile: Profile, name: str) -> Profile:
    """`profile` as `name` uses it. Constants that the user overrides stay."""
    calibration = profile.calibration
    constants = {
        key: value
        for key, value in software_constants(name).items()
        if f"calibration.{key}" not in profile.sources
    }
    if constants.get("attention") not in calibration.kernels:
        constants.pop("attention", None)
    named = None if name == BUNDLED else name
    return replace(profile, calibration=replace(calibration, **constants, software=named))


def hosts_for_software(inventory: Inventory, name: str) -> Inventory:
    """`inventory` with the devices of all its hosts as `name` uses them.

    Raises:
        PlanError: it is for other software already.
    """
    for host in inventory.hosts:
        other = host.profile and host.profile.calibration.software
        if other and other != name:
            raise PlanError(
                f"--software {name}, but the inventory is for runs of {other}",
                fix="leave --software out, or remove the key software of the inventory",
            )
    hosts = (
        replace(host, profile=for_software(host.profile, name)) if host.profile else host
        for host in inventory.hosts
    )
    return replace(inventory, hosts=tuple(hosts))
