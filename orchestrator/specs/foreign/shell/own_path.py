"""The folder of a script, which it finds with `$(dirname "$0")` and its like.

A batch script on Slurm is a copy in a folder of slurmd. Its author means the folder of the file.
"""

import posixpath
import re

SELF = r"\$(?:0(?!\d)|\{0\}|BASH_SOURCE\b|\{BASH_SOURCE(?:\[0\])?(?::-\$\{?0\}?)?\})"
ASKS = re.compile(
    rf"((?:\$\(|`)\s*(?:dirname|basename|realpath|readlink\s+-[efm]+)\s+(?:--?\w*\s+)*\"?){SELF}"
)
CUT = re.compile(r"\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/\*\}")
SAFE = re.compile(r"/[\w./@+=:,-]*")
"""Paths that a shell does not split or expand."""

PATH = r"\"?(?P<path>/[^\s\"'$`();&|<>*?]*)\"?"
QUIET = r"(?:(?:&?>|[12]>|>&)\s*(?:/dev/null|&1)\s*)*"
FOLDER = re.compile(
    rf"\$\(\s*dirname\s+(?:--\s+)?{PATH}\s*\)"
    rf"|`\s*dirname\s+(?:--\s+)?{PATH.replace('path', 'old')}\s*`"
)
WHOLE = re.compile(
    rf"\$\(\s*(?:realpath|readlink\s+-[efm]+)\s+(?:--?\w*\s+)*{PATH}\s*\)"
    rf"|\$\(\s*(?:CDPATH=\S*\s+)?(?:builtin\s+|command\s+)?cd\s+(?:-P\s+)?(?:--\s+)?"
    rf"{PATH.replace('path', 'to')}\s*{QUIET}(?:&&|;)\s*pwd(?:\s+-P)?\s*\)"
)
NAME = re.compile(
    r"\$\(\s*basename\s+(?:--\s+)?(?P<quote>\"?)(?P<path>[^\s\"'$`();&|<>*?-][^\s\"'$`();&|<>*?]*)"
    r"(?P=quote)(?:\s+\"?(?P<suffix>\.\w+)\"?)?\s*\)"
)
DEEPEST = 5
"""Most `dirname` inside of each other."""


def with_own_path(text: str, path: str) -> str:
    """The script `text` with its own `path` where it asks for its folder. `path` is absolute; with
    a space or another special sign in it, `text` stays as it is."""
    if SAFE.fullmatch(path) is None:
        return text
    text = CUT.sub(posixpath.dirname(path), text)
    return ASKS.sub(lambda found: f"{found[1]}{path}", text)


def computed(text: str) -> str:
    """`text` with the value of each `$(dirname PATH)`, `$(realpath PATH)` and `$(cd PATH && pwd)`
    that has an absolute path without variables, and of each `$(basename PATH)` with any path
    without variables. Links are not followed."""
    for _ in range(DEEPEST):
        before = text
        text = FOLDER.sub(_folder, text)
        text = NAME.sub(_name, text)
        text = WHOLE.sub(lambda one: posixpath.normpath(one["path"] or one["to"]), text)
        if text == before:
            break
    return text


def _folder(found: re.Match[str]) -> str:
    # A shell ignores slashes at the end.
    return posixpath.dirname((found["path"] or found["old"]).rstrip("/")) or "/"


def _name(found: re.Match[str]) -> str:
    name = posixpath.basename(found["path"].rstrip("/")) or "/"
    suffix = found["suffix"] or ""
    return name.removesuffix(suffix) if name != suffix else name
