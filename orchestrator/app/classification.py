"""`ndctl classify`: the failure class of one rank, from the end of its log.

The supervisor's own diagnosis runs on an attempt in which only this rank failed, so that there is
one way to classify a failure.
"""

import signal as signals
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from typing import Any, BinaryIO

from msgspec import Struct

from orchestrator.contract.codec import encode
from orchestrator.contract.messages.events import EvidenceGathered, RankExited
from orchestrator.contract.spec.failures import FailureRule, Remedy, Scope
from orchestrator.dashboard.format import one_line
from orchestrator.diagnosis.cause.diagnose import diagnose
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.classes import with_class
from orchestrator.diagnosis.logs.patterns import MOST_BYTES
from orchestrator.diagnosis.logs.readings import End, read_exit, read_kernel
from orchestrator.diagnosis.stacks.kernel_stacks import with_places
from orchestrator.job.failures.policy import usual_remedy

HOST = "host"
KERNEL_BYTES = 4 << 20
"""Read from the end of a kernel log; more than the buffer of a kernel holds."""
FAILED = 1
"""Exit code of a rank if none is given."""


class Classification(Struct, frozen=True, kw_only=True):
    """All fields are None if no class matches."""

    class_: str | None
    scope: Scope | None
    action: Remedy | None
    excludes_host: bool
    """Whether the default policy excludes the host at the first such failure."""
    line: str | None
    """The line that matched; None if a signal or an exit code decided."""
    pattern: str | None
    advice: str | None


UNKNOWN = Classification(
    class_=None,
    scope=None,
    action=None,
    excludes_host=False,
    line=None,
    pattern=None,
    advice=None,
)


def classify_log(
    text: str,
    *,
    kernel: str = "",
    exit_code: int | None = None,
    signal: str | None = None,
    own: tuple[FailureRule, ...] = (),
) -> Classification:
    """The class of a rank whose log ends with `text`.

    Args:
        kernel: lines of the kernel log of the host.
        signal: name or number. Without a signal and an exit code, the exit code is 1.
        own: failure classes of a spec.
    """
    number = signal_number(signal) if signal else None
    code = exit_code if exit_code is not None or number is not None else FAILED
    end = End(exit_code=code, signal=number, lines=tuple(text.splitlines()))
    reading = read_exit(end, own)
    exited = RankExited(
        at=0.0,
        attempt=1,
        rank=0,
        host=HOST,
        exit_code=code,
        signal=number,
        step=0,
        stopped=False,
        detected_after_s=0.0,
        error=None,
        log_tail=(),
        reading=reading,
    )
    # In the form in which an agent reports kernel lines.
    lines = tuple(with_class(with_places(kernel.splitlines()), own))
    said = read_kernel(lines, own)
    told = EvidenceGathered(
        at=0.0, attempt=1, host=HOST, ranks=(), kernel=lines, readings=said, unasked=True
    )
    verdict = diagnose(Findings(opened_at=0.0, exits=(exited,), evidence=(told,)), own)
    found, blamed = verdict.failure, verdict.culprit.host is not None
    if not (text or exit_code is not None or signal) and found not in said:
        # With only a kernel log, show its class even if it would not end a rank.
        found = next(iter(said), None)
    if found is None:
        return UNKNOWN
    return Classification(
        class_=found.name,
        scope=found.scope,
        action=found.action,
        excludes_host=blamed and usual_remedy(found) == "replace",
        line=found.line or None,
        pattern=found.pattern or None,
        advice=found.advice or None,
    )


def read_end(file: BinaryIO, most: int = MOST_BYTES) -> str:
    """The last `most` bytes. Reads to the end, so that pipes work too."""
    start = end = b""
    size = 0
    while piece := file.read(most):
        start = start or piece[:2]
        size += len(piece)
        end = (end + piece)[-most:]
    if start not in (BOM_UTF16_LE, BOM_UTF16_BE):
        return end.decode(errors="replace")
    # The log comes from a shell of Windows. `end` may begin in the middle of a character.
    whole = end[(size - len(end)) % 2 :]
    code = "utf-16-le" if start == BOM_UTF16_LE else "utf-16-be"
    return whole.decode(code, errors="replace").removeprefix("\ufeff")


def signal_number(said: str) -> int:
    """The number of SIGKILL, KILL or 9. Raises ValueError."""
    name = said.upper()
    if name.isdecimal():
        known = int(name) in set(signals.Signals)
        number = int(name) if known else 0
    else:
        full = name if name.startswith("SIG") else f"SIG{name}"
        found = signals.Signals.__members__.get(full)
        number = int(found) if found else 0
    if not number:
        raise ValueError(f"unknown signal {said}: give a name such as SIGKILL, or a number")
    return number


def as_json(found: Classification) -> dict[str, Any]:
    body: dict[str, Any] = encode(found)
    return body


def as_text(found: Classification) -> str:
    return "\n".join(_lines(found))


def _lines(found: Classification) -> Iterator[str]:
    if found.class_ is None:
        yield "class    unknown: no line, signal or exit code matches a class"
        return
    yield f"class    {found.class_}"
    yield f"scope    {found.scope}"
    without = "; the host is excluded from the job" if found.excludes_host else ""
    yield f"action   {found.action}{without}"
    if found.line:
        yield f"line     {one_line(found.line)}"
    if found.pattern:
        yield f"pattern  {found.pattern}"
    if found.advice:
        yield f"advice   {found.advice}"
