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
