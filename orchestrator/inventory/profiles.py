"""Loads hardware profiles by name or from a file, with calibration and a user's overrides."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.contract.devices import CPU, PROFILE_NAMES

if TYPE_CHECKING:
    from orchestrator.contract.codec import Problem
    from orchestrator.inventory.profile import Profile

FOLDER = Path(__file__).parent / "profiles"
CALIBRATIONS = Path(__file__).parent / "calibration"
UNCALIBRATED = {"cuda": "hopper", "cpu": "cpu"}
"""Profile whose calibration is used for a profile without one, by device."""


def load_profile(
    name_or_path: str, overrides: Mapping[str, Any] | None = None, overridden_in: str = ""
) -> "Profile":
    """The profile with this name, or in the YAML file at this path, with `overrides`.

    `overrides` is nested like the file, and values that it changes get `overridden_in` as source. A
    profile without calibration gets the numbers of another one, which are marked as guessed.
    Numbers under `calibration` in its file take precedence.

    Raises:
        SpecError: no such profile, or with all its problems, each with its place.
    """
    from orchestrator.inventory.profile import Profile
    from orchestrator.yaml_document import decode_document, parse, read_text

    if name_or_path in PROFILE_NAMES:
        path = FOLDER / f"{name_or_path}.yaml"
    elif name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    else:
        from orchestrator.errors import SpecError

        problem = unknown_profile(name_or_path)
        raise SpecError(f"profile {problem.said}", fix=problem.fix)
    document = parse(read_text(path, f"known profiles: {', '.join(PROFILE_NAMES)}"), str(path))
    if isinstance(document.data, dict):
        document.data = _laid_over({"calibration": _calibration(document.data)}, document.data)
    if overrides and isinstance(document.data, dict):
        document.data.setdefault("sources", {})
        if "intra_block" in overrides:  # applied to the default, which is the link inside a host
            document.data.setdefault("intra_block", document.data.get("intra_host"))
        document.data = _merged(document.data, overrides, f"overridden in {overridden_in}")
        for place in _paths(overrides):
            document.places[place] = f"{overridden_in}, overrides"
    return decode_document(Profile, document)


def _calibration(data: Mapping[str, Any]) -> dict[str, Any]:
    """Calibration of the profile in `data`, by its name, and that of all links."""
    devices, links = calibration_table("devices"), calibration_table("links")
    own = [name for name, table in devices.items() if data.get("name") in table["profiles"]]
    name = own[0] if own else UNCALIBRATED.get(str(data.get("device")), "hopper")
    found = {key: value for key, value in devices[name].items() if key != "profiles"}
    if not own:
        found["certainty"] = "guessed"
    published = calibration_table("ranges")
    alike = [one for one in published["comparable"] if own and one["architecture"] == name]
    found |= {"architecture": name, "links": links, "comparison": calibration_table("comparison")}
    return found | {
        "ranges": published["range"],
        "widening": _widening(published["widening"], data.get("name"), name if own else None),
        "comparable": alike,
        "adapters": published["adapters"].get(name, 0) if own else 0,
    }


def _widening(known: Mapping[str, Any], profile: object, architecture: str | None) -> float:
    for key, name in (("profile", profile), ("architecture", architecture)):
        if name in known[key]:
            return float(known[key][name])
    return float(known["unknown"])


@cache
def calibration_table(name: str) -> dict[str, Any]:
    """The file of `calibration/` with this name."""
    import tomllib

    return tomllib.loads((CALIBRATIONS / f"{name}.toml").read_text(encoding="utf-8"))


def unknown_profile(name: str) -> "Problem":
    """What is wrong with a `profile` that no profile has as its name."""
    from orchestrator.contract.codec import Problem, nearest
    from orchestrator.contract.devices import nearest_gpu

    near = nearest_gpu(name) or nearest(name, [CPU])
    own = (
        "name a .yaml file with a profile of your own; `ndctl calibrate --write FILE` measures one"
    )
    fix = f"did you mean {near}?" if near else own
    limit = f"one of {', '.join(PROFILE_NAMES)}, or the path of a .yaml file"
    return Problem(path="profile", value=name, limit=limit, fix=fix)


def _merged(data: dict[str, Any], overrides: Mapping[str, Any], source: str) -> dict[str, Any]:
    sources = dict(data["sources"]) | dict.fromkeys(_paths(overrides), source)
    return _laid_over(data, overrides) | {"sources": sources}


def _laid_over(data: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(data)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = _laid_over(below, value)
        else:
            merged[key] = value
    return merged


def _paths(data: Mapping[str, Any], above: str = "") -> list[str]:
    """Paths of the values that are not mappings."""
    found = []
    for key, value in data.items():
        path = f"{above}.{key}" if above else str(key)
        found += _paths(value, path) if isinstance(value, Mapping) else [path]
    return found
