"""Golden files of variants: what a variant changes in the text that it is derived from."""

from difflib import unified_diff


def changes(base: str, variant: str) -> str:
    """A unified diff without line numbers, which would change with each line of the base."""
    lines = unified_diff(base.splitlines(), variant.splitlines(), lineterm="")
    shown = ["@@" if line.startswith("@@") else line for line in lines][2:]
    # An empty line of the context has no space at its end, which editors would remove.
    return "\n".join("" if line == " " else line for line in shown) + "\n"
