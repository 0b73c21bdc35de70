"""What `$(dirname "$0")` and similar expressions of a script become.

On Slurm a batch script runs as a copy in a folder of slurmd. Its author means the folder of the
file, so that is taken there, too.
"""

import posixpath
import re

SELF = r"\$(?:0(?!\d)|\{0\}|BASH_SOURCE\b|\{BASH_SOURCE(?:\[0\])?(?::-\$\{?0\}?)?\})"
ASKS = re.compile(
    rf"((?:\$\(|`)\s*(?:dirname|basename|realpath|readlink\s+-[efm]+)\s+(?:--?\w*\s+)*\"?){SELF}"
)
"""A command about the path of the script. `$0` elsewhere may be the name of a program."""
CUT = re.compile(r"\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/\*\}")
"""`${0%/*}`, the same folder without a command."""
SAFE = re.compile(r"/[\w./@+=:,-]*")
"""Paths that a shell does not split or expand."""

PATH = r"\"?(?P<{}>/[^\s\"'$`();&|<>*?]*)\"?"
"""`{}`: name of the group."""
QUIET = r"(?:(?:&?>|[12]>|>&)\s*(?:/dev/null|&1)\s*)*"
FOLDER = re.compile(
    rf"\$\(\s*dirname\s+(?:--\s+)?{PATH.format('path')}\s*\)"
    rf"|`\s*dirname\s+(?:--\s+)?{PATH.format('old')}\s*`"
)
WHOLE = re.compile(
    rf"\$\(\s*(?:realpath|readlink\s+-[efm]+)\s+(?:--?\w*\s+)*{PATH.format('path')}\s*\)"
    rf"|\$\(\s*(?:CDPATH=\S*\s+)?(?:builtin\s+|command\s+)?cd\s+(?:-P\s+)?(?:--\s+)?"
    rf"{PATH.format('to')}\s*{QUIET}(?:&&|;)\s*pwd(?:\s+-P)?\s*\)"
)
NAME = re.compile(
    r"\$\(\s*basename\s+(?:--\s+)?(?P<quote>\"?)(?P<path>[^\s\"'$`();&|<>*?-][^\s\"'$`();&|<>*?]*)"
    r"(?P=quote)(?:\s+\"?(?P<suffix>\.\w+)\"?)?\s*\)"
)
DEEPEST = 5
"""Most commands inside each other that are computed."""


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
