"""Which package raised an exception, by the innermost frame of its traceback.

Words that no rule knows are still words of the package that wrote them: an OSError that h5py raised
is about a file of data, and a RuntimeError of Triton about a kernel that was to be compiled.
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
_AT_IMPORT = re.compile(rb", in <module>\s*$")
_EXCEPTION = re.compile(rb"[A-Za-z_][\w.]{0,120}(?:: |$)")


def with_packages(text: Text) -> Text:
    """With a line `raised in PIL/ImageFile.py: OSError: ...` in the place of an innermost frame
    that lies in a package, or `raised at import in ...` where that was just being imported; frames
    of the program's own files stay as they are."""
    frames = list(text.numbers(FRAME))
    tell = set(text.numbers(CODE_THAT_TELLS)) if frames else set()
    changes: dict[int, tuple[str, bytes]] = {}
    below: set[int] = set()
    for frame, following in pairwise((*frames, len(text.lines))):
        package = _package_of(text.line(frame))
        raised = _exception_below(text, frame, following) if package else None
        if raised is not None and tell.isdisjoint(range(frame, raised)):
            # As deep as the frame, so that it stays a part of its traceback.
            when = b"at import in " if _is_import(text.line(frame)) else b"in "
            line = b"  raised " + when + package + b": " + text.line(raised).strip()
            changes[frame] = (text.lines[raised], line)
            below.update(range(frame + 1, raised))  # the code of the frame
    return text.rewritten(changes).without(below) if changes else text


def _exception_below(text: Text, frame: int, following: int) -> int | None:
    """The line that says what was raised there; None: the frame called the one that follows."""
    indent = _indent(text.line(frame))
    for number in range(frame + 1, following):
        line = text.line(number)
        if _indent(line) <= indent and line.strip():
            return number if _EXCEPTION.match(line.strip()) else None
    return None


def _is_import(frame: bytes) -> bool:
    return _AT_IMPORT.search(frame) is not None and any(folder in frame for folder in _FOLDERS)


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
