"""How often a host breaks a job, by cause: tables with their sources, by ndctl or a site."""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.codec import nearest
from orchestrator.contract.spec.limits import Above, AtLeast
from orchestrator.errors import SpecError
from orchestrator.yaml_document import decode_document, parse, read_text

TABLE = Path(__file__).with_name("rates.yaml")
DEFAULT = "llama3"
DAY_S = 86400.0

Detected = Literal["exit", "host", "hang", "planned"]


class FailureClass(Struct, frozen=True, kw_only=True):
    name: str
    count: Annotated[float, Above(0)]
    """Number of failures seen on all hosts of the table over all its days."""
    detected: Detected = "exit"
    host: Literal["leaves", "stays"] = "leaves"


class Rates(Struct, frozen=True, kw_only=True):
    name: str
    source: str
    hosts: Annotated[float, Above(0)]
    days: Annotated[float, Above(0)]
    devices_per_host: Annotated[int, AtLeast(1)]
    """Devices per host of the hosts that were counted."""
    classes: tuple[FailureClass, ...]

    def per_host_s(self, one: FailureClass) -> float:
        """Failures of class `one` per second on one host."""
        return one.count / (self.hosts * self.days * DAY_S)

    @property
    def unplanned_per_host_s(self) -> float:
        return sum(self.per_host_s(one) for one in self.classes if one.detected != "planned")

    @property
    def per_1000_host_days(self) -> float:
        return self.unplanned_per_host_s * 1000 * DAY_S

    def for_devices(self, each: int) -> "Rates":
        """Rates for hosts of which a job uses `each` devices. Most failures of a host are those of
        its devices, their memory, links and network cards. Planned ones concern the whole host and
        are not scaled."""
        if each == self.devices_per_host:
            return self
        factor = each / self.devices_per_host
        source = (
            f"{self.source} Counted on hosts with {self.devices_per_host} devices; multiplied by"
            f" {factor:.3g} for hosts of which {each} are used."
        )
        return replace(self._scaled(factor), source=source, devices_per_host=each)

    def with_mtbf(self, hours: float) -> "Rates":
        """Rates for hosts that fail once in `hours` on average. Each class keeps its share, and
        planned ones are not changed."""
        source = (
            f"a host's mean time between failures was given as {hours:g} h; shares: {self.name}"
        )
        factor = 1 / (hours * 3600 * self.unplanned_per_host_s)
        return replace(self._scaled(factor), source=source)

    def _scaled(self, factor: float) -> "Rates":
        classes = tuple(
            one if one.detected == "planned" else replace(one, count=one.count * factor)
            for one in self.classes
        )
        return replace(self, classes=classes)


class _Tables(Struct, frozen=True, kw_only=True):
    tables: tuple[Rates, ...]


def rates_of(name: str) -> Rates:
    """One of ndctl's tables by its name, or the only one of a site's own file.

    Raises:
        SpecError: no such table, or with all problems of the file.
    """
    if name.endswith((".yaml", ".yml")):
        return _one_of(Path(name))
    for table in _ours():
        if table.name == name:
            return table
    names = [table.name for table in _ours()]
    near = nearest(name, names)
    hint = f"did you mean {near}? " if near else ""
    raise SpecError(
        f"no failure rates are called {name}; known: {', '.join(names)}",
        fix=f"{hint}the name of your own file must end in .yaml, and {TABLE} shows its form",
    )


def _one_of(path: Path) -> Rates:
    tables = _read(path)
    if len(tables) != 1 or all(one.detected == "planned" for one in tables[0].classes):
        raise SpecError(
            f"{path} must have one table with an unplanned class",
            fix="write one list entry below `tables`, with hosts, days, and classes with counts",
        )
    return tables[0]


@cache
def _ours() -> tuple[Rates, ...]:
    return _read(TABLE)


def _read(path: Path) -> tuple[Rates, ...]:
    text = read_text(path, f"{TABLE} shows the form")
    return decode_document(_Tables, parse(text, str(path))).tables
