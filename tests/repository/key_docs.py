"""Writes docs/keys.md from the structs of the job spec: `python -m tests.repository.key_docs`."""

import re
from pathlib import Path

from orchestrator.contract.codec import ABSENT
from orchestrator.specs.explain import default_words
from orchestrator.specs.keys import ROOT, Key, keys_inside

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"
BEGIN = """# Keys of a job spec

`ndctl explain KEY` prints the same in the terminal, and `ndctl schema` a JSON schema for editors
([reference.md](reference.md#editors)). A script writes this page from the program.
"""


def page() -> str:
    return "\n".join([BEGIN, *_section(ROOT)]).rstrip() + "\n"


def _section(key: Key) -> list[str]:
    below = keys_inside(key)
    lines = [f"## `{key.path}`" if key.path else "## The top", ""]
    if key.path:
        lines += [_plain(key.about), ""]
    lines += ["| key | values | default | meaning |", "|---|---|---|---|"]
    lines += [_row(one) for one in below]
    lines.append("")
    for one in below:
        if one.inside is not None:
            lines += _section(one)
    return lines


def _row(key: Key) -> str:
    name = key.name.removesuffix("[]")
    default = "" if key.default is ABSENT else f"`{default_words(key)}`"
    cells = [f"`{name}`", key.kind, "required" if key.required else default, key.about]
    return f"| {' | '.join(map(_plain, cells))} |"


def _plain(text: str) -> str:
    """One line that a table can hold."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
