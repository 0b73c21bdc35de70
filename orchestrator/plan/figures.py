"""Formats bytes, seconds and counts for a person."""


def show_bytes(count: int) -> str:
    """`count` bytes with 3 digits and a binary unit."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if size < 999.5:  # larger values would be formatted as 1e+03
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 1000 else f"{size:.0f} TiB"


def show_seconds(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds * 1e6)} us"


def show_traffic(count: float) -> str:
    """Bytes of traffic with a decimal unit, as in data rates."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{three_digits(count / factor)} {unit}"
    return f"{count:.0f} B"


def three_digits(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


AMOUNTS = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""Suffixes of large counts, as in `15T` tokens."""


def show_amount(count: float) -> str:
    """A count with 3 digits, and a suffix from a million on."""
    for suffix in ("T", "B", "M"):
        if count >= AMOUNTS[suffix]:
            return f"{three_digits(count / AMOUNTS[suffix])}{suffix}"
    return f"{count:,.0f}" if count >= 1000 else three_digits(count)


def read_amount(text: str) -> float:
    """The count in `15T`, `300B` or `1.5e12`.

    Raises:
        ValueError: it is no positive count below 1e21.
    """
    suffixes = {suffix.lower(): factor for suffix, factor in AMOUNTS.items()}
    number = text.strip().lower()
    factor = suffixes.get(number[-1:], 1.0)
    count = float(number[:-1] if number[-1:] in suffixes else number) * factor
    if not 1 <= count < 1e21:  # also refuses nan
        raise ValueError(f"{text} is no positive count")
    return count


def show_flops(count: float) -> str:
    for factor, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP")):
        if count >= factor:
            return f"{three_digits(count / factor)} {unit}"
    return f"{three_digits(count / 1e9)} GFLOP"


def show_energy(kwh: float) -> str:
    for factor, unit in ((1e-6, "GWh"), (1e-3, "MWh"), (1.0, "kWh")):
        if kwh * factor >= 1:
            return f"{three_digits(kwh * factor)} {unit}"
    return f"{three_digits(kwh * 1e3)} Wh"


def show_duration(seconds: float) -> str:
    """Days, hours or minutes, for times that a person waits."""
    unit, name = _unit_of(seconds)
    return f"{three_digits(seconds / unit)} {name}" if unit > 1 else show_seconds(seconds)


def show_durations(low: float, high: float) -> str:
    """A range with one unit, because `44.0 h to 3.11 days` is hard to compare."""
    unit, name = _unit_of(high)
    if unit == 1:
        return f"{show_seconds(low)} to {show_seconds(high)}"
    return f"{three_digits(low / unit)} to {three_digits(high / unit)} {name}"


def _unit_of(seconds: float) -> tuple[float, str]:
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit or (name == "h" and seconds >= unit):
            return unit, name
    return 1.0, "s"
