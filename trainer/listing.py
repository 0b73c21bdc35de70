"""Shortens long lists in error messages."""

from collections.abc import Sequence

MOST = 6


def listed(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - MOST} more" if len(texts) > MOST else ""
    return "; ".join(texts[:MOST]) + more
