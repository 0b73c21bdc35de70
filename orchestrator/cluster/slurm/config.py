"""`scontrol show config`."""

from collections.abc import Mapping


def parse_config(text: str) -> Mapping[str, str]:
    """Each setting's value, without those that it says `(null)` of."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs if value.strip() != "(null)"}
