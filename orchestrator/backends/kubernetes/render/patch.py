"""Merges the user's patch into a pod template. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

MERGE_KEYS = ("mountPath", "name")
"""Keys that identify list entries. The first key that all entries have is used."""


def merged(base: Any, patch: Any) -> Any:
    """`patch` applied to `base`: mappings are merged key by key (null removes a key), lists of
    named entries are merged entry by entry, and everything else is replaced."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        kept = {key: value for key, value in base.items() if key not in patch}
        changed = {
            key: merged(base.get(key), value) for key, value in patch.items() if value is not None
        }
        order = [*base, *(key for key in patch if key not in base)]
        both = kept | changed
        return {key: both[key] for key in order if key in both}
    if _is_list(base) and _is_list(patch):
        return _merged_lists(base, patch)
    return _without_null(patch)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _merged_lists(base: Sequence[Any], patch: Sequence[Any]) -> list[Any]:
    key = next((key for key in MERGE_KEYS if _all_have(key, [*base, *patch])), None)
    if key is None:
        return [_without_null(one) for one in patch]
    found = {one[key]: one for one in base}
    for one in patch:
        found[one[key]] = merged(found.get(one[key], {}), one)
    return list(found.values())


def _all_have(key: str, entries: Sequence[Any]) -> bool:
    return all(isinstance(one, Mapping) and key in one for one in entries)


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(one) for key, one in value.items() if one is not None}
    if _is_list(value):
        return [_without_null(one) for one in value]
    return value
