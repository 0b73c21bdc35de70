"""Constants of the model: what devices and links make of their nominal rates, from data files.

All come from measurements of single operations (`calibration/*.toml`, each with its source), none
from the training of a model.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.cluster.profile import Profile

FOLDER = Path(__file__).parent / "calibration"
UNKNOWN = {"cuda": "hopper", "cpu": "cpu"}
"""Whose numbers a profile gets that no file knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCalibration:
    """See `calibration/devices.toml` for what each number means."""

    gemm: Mapping[str, float]
    attention_forward: float
    attention_backward: float
    attention_half: float
    attention_heads: tuple[float, float]
    memory: float
    processors: int
    tiles: tuple[tuple[int, int, float], ...]
    split: float
    depth_half: float
    steady: float
    gap_s: float
    host_op_s: float
    sharded_op_s: float
    unit_s: float
    contention: float
    host_link: float
    host_memory: float
    certainty: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCalibration:
    """See `calibration/links.toml`."""

    share: float
    half_bytes: float
    base_s: float


def device_calibration(profile: Profile) -> DeviceCalibration:
    """For `profile`, by its name; one that nobody calibrated gets a guess, and says so."""
    tables = _tables("devices")
    for table in tables.values():
        if profile.name in table["profiles"]:
            return _device(table)
    return _device(tables[UNKNOWN[profile.device]] | {"certainty": "guessed"})


def _device(table: Mapping[str, Any]) -> DeviceCalibration:
    wanted = {field.name for field in fields(DeviceCalibration)}
    values = {key: value for key, value in table.items() if key in wanted}
    values["tiles"] = tuple(map(tuple, table["tiles"]))
    values["attention_heads"] = tuple(table["attention_heads"])
    return DeviceCalibration(**values)


def link_calibration(kind: str) -> LinkCalibration:
    return LinkCalibration(**_tables("links")[kind])


@cache
def _tables(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
