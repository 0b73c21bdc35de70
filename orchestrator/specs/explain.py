"""Text of `ndctl explain`: one key of a spec, or the tree of keys below it."""

import json
import textwrap

from orchestrator.contract.codec import ABSENT
from orchestrator.specs.keys import ROOT, Key, all_keys, keys_inside

MOST_DEFAULT = 60
"""Longer defaults, such as the list of Kubernetes' topology labels, are cut."""


def describe_key(key: Key, width: int) -> str:
    """Type, default and meaning of `key`, and the same of the keys one level inside."""
    lines = [] if key is ROOT else [f"KEY      {key.path}", *_labelled("TYPE", key.kind, width)]
    if key is not ROOT and not (key.default is ABSENT and key.inside is not None):
        lines += _labelled("DEFAULT", default_words(key), width)
    if key.about:
        lines += ["", *_wrapped(key.about, width)]
    if below := keys_inside(key):
        lines += ["", "KEYS"]
        for one in below:
            lines += _entry(one, width)
    return "\n".join(lines).lstrip("\n")


def _labelled(label: str, text: str, width: int) -> list[str]:
    return _wrapped(text, width, f"{label:<9}", " " * 9)


def _entry(key: Key, width: int) -> list[str]:
    return [*_wrapped(head(key), width, "  ", " " * 6), *_wrapped(key.about, width, " " * 6)]


def head(key: Key) -> str:
    """`lr: number, above 0 (default 0.0003)`."""
    if key.default is ABSENT:
        end = " (required)" if key.required else ""
    else:
        end = f" (default {default_words(key)})"
    return f"{key.name}: {key.kind}{end}"


def default_words(key: Key) -> str:
    """The default as it is written in YAML."""
    if key.default is ABSENT:
        return "none: it must be given"
    text = key.default if isinstance(key.default, str) and key.default else json.dumps(key.default)
    return text if len(text) <= MOST_DEFAULT else f"{text[: MOST_DEFAULT - 1]}…"


def _wrapped(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """The paragraphs of `text`, each wrapped. `first` is before its first line, `rest` before the
    others."""
    rest = first if rest is None else rest
    return [
        line
        for part in text.split("\n\n")
        for line in textwrap.wrap(
            part,
            width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    ]


def describe_tree(key: Key) -> str:
    """Names, types and defaults of all keys below `key`, one a line."""
    lines = [key.path] if key.path else []
    outer = key.path.count(".") if key.path else 0
    lines += ["  " * (one.path.count(".") - outer) + head(one) for one in all_keys(key)]
    return "\n".join(lines)


def key_json(key: Key, *, recursive: bool) -> dict[str, object]:
    """The answer of `explain --json`. `default` is missing if the key must be given."""
    body: dict[str, object] = {
        "key": key.path,
        "type": key.kind,
        "required": key.required,
        "description": key.about,
    }
    if key.default is not ABSENT:
        body["default"] = key.default
    below = all_keys(key) if recursive else keys_inside(key)
    return body | {"keys": [key_json_alone(one) for one in below]}


def key_json_alone(key: Key) -> dict[str, object]:
    body = key_json(key, recursive=False)
    del body["keys"]
    return body
