"""Parses Kubernetes' quantities: `8`, `63770m`, `500Gi`, `1e3`."""

import re
from fractions import Fraction
from functools import lru_cache

UNITS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "": Fraction(1),
    **{unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", 1)},
}
WRITTEN = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:[eE]([+-]?\d{1,3})|([A-Za-z]*))")


@lru_cache(maxsize=4096)  # thousands of nodes and pods write few amounts
def quantity(text: str | int | float) -> Fraction:
    """The exact amount; 0 for text that the API server would not accept."""
    found = WRITTEN.fullmatch(str(text))
    if found is None or (unit := UNITS.get(found[3] or "")) is None:
        return Fraction(0)
    return Fraction(found[1]) * Fraction(10) ** int(found[2] or 0) * unit


def words(amount: Fraction, resource: str) -> str:
    """`amount` for people: bytes in Gi, anything else as a number."""
    if resource == "memory" or resource.startswith(("hugepages-", "ephemeral-storage")):
        return f"{float(amount / UNITS['Gi']):.4g}Gi"
    return f"{float(amount):.10g}"
