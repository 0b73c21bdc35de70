"""Patterns of `.gitignore` and `.ndctlignore`, as `man gitignore` describes them. Pure.

A pattern is asked about one path itself, never about the folders above it: a folder that is ignored
is not entered, and one that an inner file admits again does not admit what is in it.
"""

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

CLASS = re.compile(r"\[([!^]?)(\]?(?:\[:\w+:\]|\\.|[^\]\\])*)\]")
POSIX = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": r"\s",
    "punct": r"!-/:-@\[-`{-~",
    "xdigit": "0-9a-fA-F",
}


class Pattern(Struct, frozen=True):
    regex: "re.Pattern[str]"
    ignores: bool
    """False: a line that begins with `!`."""
    folders_only: bool
    by_name: bool
    """It has no slash, so that it is about the last part of a path."""

    def matches(self, path: str, *, is_folder: bool) -> bool:
        if self.folders_only and not is_folder:
            return False
        return self.regex.fullmatch(path.rpartition("/")[2] if self.by_name else path) is not None


def parse(lines: Iterable[str]) -> tuple[Pattern, ...]:
    return tuple(found for line in lines if (found := _pattern(line)) is not None)


def ignored(patterns: Sequence[Pattern], path: str, *, is_folder: bool) -> bool | None:
    """Whether they ignore `path`, relative to the folder of their file. None: they do not say."""
    for pattern in reversed(patterns):  # the last one that matches decides
        if pattern.matches(path, is_folder=is_folder):
            return pattern.ignores
    return None


def _pattern(line: str) -> Pattern | None:
    line = re.sub(r"(?<!\\) +$", "", line.rstrip("\r\n"))
    if not line or line.startswith("#"):
        return None
    ignores = not line.startswith("!")
    text = line[not ignores :]
    folders_only = text.endswith("/")
    text = text.removesuffix("/")
    if not text:
        return None
    try:
        regex = re.compile(_translated(text.removeprefix("/")), re.DOTALL)
    except re.error:  # a range such as `[z-a]`, which matches nothing for git
        return None
    return Pattern(regex, ignores, folders_only, by_name="/" not in text)


def _translated(text: str) -> str:
    out, at = "", 0
    while at < len(text):
        rest, begins = text[at:], at == 0 or text[at - 1] == "/"
        if begins and rest.startswith("**/"):
            out, at = out + "(?:.*/)?", at + 3
        elif begins and rest == "**":
            out, at = out + ".*", at + 2
        elif rest[0] == "*":
            out, at = out + "[^/]*", at + 1
        elif rest[0] == "?":
            out, at = out + "[^/]", at + 1
        elif found := CLASS.match(rest):
            out, at = out + _class(found[1], found[2]), at + found.end()
        elif rest[0] == "\\" and len(rest) > 1:
            out, at = out + re.escape(rest[1]), at + 2
        else:
            out, at = out + re.escape(rest[0]), at + 1
    return out


def _class(negation: str, content: str) -> str:
    """A class never matches a slash."""
    content = re.sub(r"\[:(\w+):\]", lambda found: POSIX.get(found[1], ""), content)
    content = re.sub(r"\\(.)|([\[\]^&~|])", lambda found: "\\" + (found[1] or found[2]), content)
    return f"(?!/)[{'^' if negation else ''}{content}]"
