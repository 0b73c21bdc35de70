"""Finds the package that raised an exception, by the innermost frame of its traceback.

Even a message that no rule knows comes from a package: an OSError of h5py is about a data file, and
a RuntimeError of Triton is about a kernel that was being compiled.
"""

import re
from itertools import pairwise

from orchestrator.diagnosis.logs.last_words import CODE_THAT_TELLS
from orchestrator.diagnosis.logs.patterns import Text

FRAME = (r'^\s*File "[^"]*", line \d+',)
_PATH = re.compile(rb'\s*File "([^"]*)"')
_FOLDERS = (b"site-packages/", b"dist-packages/")
_STANDARD = re.compile(rb"/python3\.\d{1,2}/(.{1,200})$")
_OF_CYTHON = re.compile(rb"[\w/.]{1,100}\.(?:pyx|pxi|pxd)$")
_OF_A_MODULE = re.compile(rb", in <module>\s*$")
_STARTED = (r"Traceback \(most recent call last\):\s*$|, in _run_code\s*$",)
"""Lines above the frame of a program: it is the first of its traceback, or `python -m` runs it."""
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]{0,120}(?:: |$)")


def with_packages(text: Text) -> Text:
    """The text with a line such as `raised in PIL/ImageFile.py: OSError: ...` in place of an
    innermost frame inside a package, or `raised at import in ...` if the package was being
    imported. Frames in the program's own files stay."""
    frames = list(text.numbers(FRAME))
    tell = set(text.numbers(CODE_THAT_TELLS)) if frames else set()
    changes: dict[int, tuple[str, bytes]] = {}
    below: set[int] = set()
    for frame, following in pairwise((*frames, len(text.lines))):
        package = _package_of(text.line(frame))
        raised = _exception_below(text, frame, following) if package else None
        if raised is not None and tell.isdisjoint(range(frame, raised)):
            # Indented like the frame, so that it stays part of its traceback.
            when = b"at import in " if _is_import(text, frame) else b"in "
            line = b"  raised " + when + package + b": " + text.line(raised).strip()
            changes[frame] = (text.lines[raised], line)
            below.update(range(frame + 1, raised))  # the source lines of the frame
    return text.rewritten(changes).without(below) if changes else text


def _exception_below(text: Text, frame: int, following: int) -> int | None:
    """Number of the line with the exception raised in the frame; None: it called the next frame."""
    indent = _indent(text.line(frame))
    for number in range(frame + 1, following):
        line = text.line(number)
        if _indent(line) <= indent and line.strip():
            return number if _EXCEPTION.match(line.strip()) else None
    return None


def _is_import(text: Text, frame: int) -> bool:
    """Whether the frame is of a module of a package that another module imports. A program inside
    a package, such as `torchrun .../site-packages/swift/cli/sft.py`, has such a frame too."""
    line = text.line(frame)
    if not _OF_A_MODULE.search(line) or not any(folder in line for folder in _FOLDERS):
        return False
    above = text.pick(range(max(frame - 2, 0), frame))  # a frame may have its source line
    return not above.has(_STARTED)


def _package_of(frame: bytes) -> bytes:
    found = _PATH.match(frame)
    path = found[1] if found else b""
    for folder in _FOLDERS:
        if folder in path:
            return path.rpartition(folder)[2]
    if standard := _STANDARD.search(path):
        return standard[1]
    return path if _OF_CYTHON.match(path) else b""


def _indent(line: bytes) -> int:
    return len(line) - len(line.lstrip())
