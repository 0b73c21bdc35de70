"""Classifies what a rank, a launcher or a kernel printed. The class is decided once. Pure.

An agent does this for processes of its host, in a thread, before it reports to the leader. So
neither the leader's event loop nor a fold of the journal ever searches foreign text.
"""

import signal
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import dropwhile

from msgspec import Struct
from msgspec.structs import replace

from ndctl.rank.phases import Phase
from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.events import RankError
from orchestrator.contract.spec.failures import ExitReading, FailureRule, Reading
from orchestrator.diagnosis.cause.exits import (
    BY_SHELL,
    EARLY,
    ENDED_FIRST,
    OUT_OF_MEMORY,
    PYTHON,
    is_broken_hardware,
    kind_of,
    signal_name,
)
from orchestrator.diagnosis.classes import (
    Classified,
    FailureSigns,
    all_that_fit,
    classify,
    default_rules,
    reading_of,
)
from orchestrator.diagnosis.logs.last_words import (
    before_steps_dropped,
    before_the_abort,
    frames_that_tell,
    last_warning,
    last_words,
    points_back,
    uncaught,
    with_warnings,
    without_cleanup,
    without_frames,
    without_noise,
    without_quotations,
)
from orchestrator.diagnosis.logs.mentions import without_mentions
from orchestrator.diagnosis.logs.patterns import Text, cut, pieces
from orchestrator.diagnosis.logs.raised_in import with_packages

OUTSIDE = frozenset({"SIGKILL", "SIGTERM"})
"""Signals that a process does not send to itself."""
WATCHDOG = "nccl-watchdog-timeout"
SERVICE = "service-unreachable"
"""Class with messages like those about a lost peer, but about another service."""
ENDINGS = frozenset({"abort", "segfault", PYTHON, "unknown"})
"""Classes by how a process ended, used if its log has no known message."""
POINTING = ENDINGS | {"data-loader"}
"""Classes of exceptions that may only refer to an earlier failure."""
PASSED_ON = frozenset({"SIGKILL", "SIGTERM", "SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"})
MOST_KEPT = 20
"""Number of log lines that the journal keeps."""
MOST_OF_A_LINE = 500
"""Longest kept line in characters, except for the line that decided the class."""
MOST_SAID = 4_000
"""Number of characters of an exception's message that the journal keeps."""

SYMPTOMS = (
    r"connection closed by (remote )?peer|connection reset by peer|connection refused|broken pipe",
    r"gloo/transport|gloo::|connectfullmesh",
    r"enforce fail",
    r"recvvalue failed|sendbytes failed",
    r"no route to host|socket\w*connect\b.*(timed out|unreachable|connection abort)",
    r"ibv_\w+ failed.*timed out",
    r"application timeout caused pair closure|store timed out|socket timeout|wait timeout",
    r"socket has timed out|timed out waiting|failed to connect|failed to recv",
    r"nccl.*(remote|peer|watchdog|was aborted)|ncclremoteerror|watchdog caught collective",
)
"""Messages of a rank that lost a peer (PyTorch's gloo, NCCL and TCPStore)."""
NO_SYMPTOMS = (r"enforce fail at (alloc_cpu|inline_container)",)
"""Messages that look like symptoms but are about the rank's own memory or file."""
TIMEOUTS = (
    r"watchdog caught collective|collective operation timeout|timed out waiting",
    r"application timeout caused pair closure|wait timeout|timeout at .*watchdog",
)
"""Messages of a rank whose collective timed out: it detected a hang itself."""


TRACEBACK = "Traceback (most recent call last):"
DIRECT_CAUSE = "The above exception was the direct cause of the following exception:"


class End(Struct, frozen=True, kw_only=True):
    """How a rank ended, and what it printed."""

    exit_code: int | None
    signal: int | None
    """Both are None if its watcher died with it, so that its end was not seen."""
    error: RankError | None = None
    lines: tuple[str, ...] = ()
    """The end of its log."""
    phase: Phase | None = None
    ended_first: bool = False
    """It returned 0 in a program of the user, and other ranks went on and failed."""


class Words(Struct, frozen=True, kw_only=True):
    """Text of a rank, prepared for the search."""

    said: Text
    """The end of its log."""
    raised: Text | None
    """Its exception, with the frames that carry information."""


@lru_cache(maxsize=256)  # in the simulation the same exits occur again and again
def read_exit(end: End, own: tuple[FailureRule, ...] = ()) -> ExitReading:
    """The class of what ended a rank, and whether the loss of a peer can look like it."""
    words = Words(said=_said(end), raised=_raised(end))
    found = _failure_of(end, words, own)
    symptom = _is_symptom(end, words, reading_of(found, own))
    by_ours = _failure_of(end, words, ()) if found and found.rule in own else found
    # A watchdog's message is a hang even if the user has a class of their own for it.
    waited = _is_symptom(end, words, reading_of(by_ours))
    return ExitReading(
        failure=reading_of(found, own),
        symptom=symptom,
        timed_out=waited and (words.raised or words.said).has(TIMEOUTS),
    )


def read_kernel(lines: Sequence[str], own: tuple[FailureRule, ...] = ()) -> tuple[Reading, ...]:
    """The classes in a kernel log, one reading per class (its first line), in the order of the
    rules. User classes and broken hardware come first, because hardware may cause the failure of a
    program.
    """
    rules = _of_kernels(own)
    fits: dict[int, Classified] = {}
    for piece in pieces(lines):  # a flood of later messages must not hide the first one
        for one in all_that_fit(FailureSigns(lines=piece), rules):
            fits.setdefault(id(one.rule), one)
    first: dict[str, Reading] = {}
    for one in (fits[id(rule)] for rule in rules if id(rule) in fits):
        reading = reading_of(one, own)
        assert reading is not None
        first.setdefault(reading.name, reading)
    return tuple(sorted(first.values(), key=lambda one: not (one.own or is_broken_hardware(one))))


@lru_cache(maxsize=64)
def _of_kernels(own: tuple[FailureRule, ...]) -> tuple[FailureRule, ...]:
    ours = (rule for rule in default_rules() if rule.name != PYTHON)
    return tuple(rule for rule in (*own, *ours) if rule.patterns)


def read_launcher(said: str, own: tuple[FailureRule, ...] = ()) -> Reading | None:
    """The class of torchrun's last message, if a restart would fail in the same way. Otherwise it
    is a failed launch, because torchrun's messages about programs and peers do not name the
    cause."""
    lines = tuple(line.strip() for line in said.splitlines() if line.strip())
    heard = without_noise(without_frames(Text.of(lines)))
    found = reading_of(classify(FailureSigns(said=heard, kind="launch-failed"), own), own)
    return found if found is not None and (found.own or found.action != "restart") else None


def read_words(said: str, own: tuple[FailureRule, ...] = ()) -> Reading | None:
    """The class of an error that a rank survives, such as a checkpoint that was not written."""
    return reading_of(classify(FailureSigns(lines=tuple(said.splitlines())), own), own)


def kept_lines(lines: Sequence[str], reading: ExitReading) -> tuple[str, ...]:
    """The log lines that are kept: the last ones without stack frames, and the one that decided the
    class wherever it is."""
    heard = without_frames(Text.of(lines)).lines
    line = reading.failure.line if reading.failure else ""
    kept = heard[-MOST_KEPT:]
    if line and line in heard and line not in kept:
        kept = (line, *kept[1 - MOST_KEPT :])
    return tuple(one if one == line else cut(one, MOST_OF_A_LINE) for one in kept)


def without_excess(error: RankError | None) -> RankError | None:
    """The exception with the middle of a very long message cut out, to keep the journal small."""
    if error is None or len(error.message) <= MOST_SAID:
        return error
    half = MOST_SAID // 2
    message = f"{error.message[:half]} … {error.message[-half:]}"
    return replace(error, message=message)


def _said(end: End) -> Text:
    """The end of its log without stack frames and without errors that it survived."""
    heard = without_frames(with_packages(without_cleanup(Text.of(end.lines))))
    return before_steps_dropped(without_quotations(with_warnings(heard)))


def _raised(end: End) -> Text | None:
    if end.error is None:
        return None
    said = end.error.said.splitlines()
    traceback = end.error.traceback.splitlines()
    frames = Text.of((*traceback, said[0]))
    # The last exception comes first: what it says itself is the better text of a general class.
    raised = Text.of((*said, *_direct_causes(traceback)))
    return frames_that_tell(with_packages(frames)).followed_by(with_warnings(raised))


def _direct_causes(traceback: Sequence[str]) -> Iterator[str]:
    """The exceptions of which the last one was raised (`raise … from …`). A stage of a pipeline
    says only so that it failed, and its cause may be a lost peer."""
    begins = 0  # the beginning of a long traceback is cut
    for number, line in enumerate(traceback):
        if line.startswith(TRACEBACK):
            begins = number
        elif line == DIRECT_CAUSE:
            lines = (one for one in traceback[begins + 1 : number] if one.strip())
            yield from dropwhile(lambda one: one[0].isspace(), lines)
            begins = number


def _failure_of(end: End, words: Words, own: tuple[FailureRule, ...]) -> Classified | None:
    """The class of what ended a rank. A mere mention of a failure excludes no host."""
    found = _class_of(end, words, own)
    if found is None or found.rule in own or not is_broken_hardware(found.rule):
        return found
    reported = without_mentions(words.said, _of_broken_hardware())
    if reported is words.said:
        return found
    return _class_of(end, replace(words, said=reported), own)


@cache
def _of_broken_hardware() -> tuple[str, ...]:
    rules = [rule for rule in default_rules() if is_broken_hardware(rule)]
    return tuple(pattern for rule in rules for pattern in rule.patterns)


def _class_of(end: End, words: Words, own: tuple[FailureRule, ...]) -> Classified | None:
    """The class of what ended a rank, by what it raised, else by its log and how it ended.

    A log may also contain harmless errors, such as a save that failed an hour ago or a connection
    that worked at the second try. So for a killed rank only lines about kills count, and for a
    crashed rank only its messages about the crash.
    """
    if end.exit_code == exit_codes.OK:  # it survived everything in its log
        return classify(FailureSigns(kind=ENDED_FIRST if end.ended_first else EARLY), own)
    by, said, raised = ended_by(end), words.said, words.raised
    signs = FailureSigns(
        exit_code=end.exit_code,
        signal=signal_name(end.signal) or _by_shell(end.exit_code),
        kind=kind_of(end.exit_code, end.signal, raised=end.error is not None),
        phase=end.phase,
    )
    if raised is not None:
        found = classify(replace(signs, said=raised), own)
        return _of_what_came_before(found, raised, said) or found
    if by in OUTSIDE:
        named = tuple(rule for rule in own if _names(rule, by))
        kills = [rule for rule in default_rules() if _kills(rule, by)]
        return classify(replace(signs, said=said), named, kills)
    last = last_words(said, _number(signs.signal))
    found = classify(replace(signs, said=last), own)
    if not by and found is not None and found.rule not in own:
        found = _without_what_follows(found, signs, said)
    if not by and (before := _of_what_came_before(found, last, said)):
        return before
    if by == "SIGABRT" and (found is None or found.rule.name in ENDINGS):
        complaint = classify(replace(signs, said=before_the_abort(said)), own)
        found = found if complaint is None or complaint.rule.name in ENDINGS else complaint
    if found is not None and (found.rule in own or not _is_ending(found.rule)):
        return found
    stands = classify(
        replace(signs, said=without_noise(said)), own if by else (), _that_stand_anywhere()
    )
    return stands or _warned_of(said, last, found) or found


def _without_what_follows(found: Classified, signs: FailureSigns, said: Text) -> Classified:
    """The class of the exception, for a rank whose libraries lost a connection after it.

    Example: `IndexError: ...`, and below it NCCL's warning about a peer that closed its connection.
    The warning does not explain the exception, which ended the rank.
    """
    if not found.line or found.rule.scope != "fabric":
        return found
    raised = uncaught(said)
    # An exception that only refers to an earlier failure may be about the lost connection.
    if raised is None or points_back(raised):
        return found
    own = classify(replace(signs, said=raised))
    return found if own is None or not own.line else own


def _warned_of(said: Text, words: Text, found: Classified | None) -> Classified | None:
    """For a rank with no other message: the peer that torch's last warning names."""
    if (found is not None and found.line) or words.lines:
        return None
    symptoms = [rule for rule in default_rules() if rule.symptom]
    return classify(FailureSigns(said=last_warning(said)), (), symptoms)


def _of_what_came_before(found: Classified | None, words: Text, said: Text) -> Classified | None:
    """For a rank whose last exception only says that something failed: the class of that failure.

    For example `RuntimeError: Worker 1 failed, see above` stands below the worker's own message. An
    exception that does not refer to an earlier one says nothing about earlier errors in the log.
    """
    if (found is not None and found.rule.name not in POINTING) or not points_back(words):
        return None
    before = classify(FailureSigns(said=without_noise(said)), (), default_rules())
    return None if before is None or _is_ending(before.rule) else before


def _is_ending(rule: FailureRule) -> bool:
    """Whether the rule matches how a rank ended or which peer it lost, and not the cause."""
    return rule.name in ENDINGS or rule.symptom


def ended_by(end: End) -> str | None:
    """The signal that ended a rank, also if it exited because of one or its end was not seen."""
    if end.exit_code == exit_codes.CHECKPOINTED:
        return "SIGTERM"
    if end.exit_code is None and end.signal is None:
        return "SIGKILL"
    return signal_name(end.signal) or _by_shell(end.exit_code)


def _by_shell(exit_code: int | None) -> str | None:
    name = signal_name(exit_code - BY_SHELL) if exit_code and exit_code > BY_SHELL else None
    return name if name in PASSED_ON else None


def _number(name: str | None) -> int | None:
    return signal.Signals.__members__.get(name) if name else None


def _is_symptom(end: End, words: Words, found: Reading | None) -> bool:
    """Whether the end looks like the loss of a peer."""
    if end.exit_code == exit_codes.REFUSED:
        return False
    if found is not None and (found.symptom or found.own):
        return found.symptom  # a user's class knows more than the patterns below
    if found is not None and found.name == SERVICE:
        return False
    if found is not None and found.line and (found.scope == "user" or is_broken_hardware(found)):
        # gloo prints a connection error when sizes do not match, and NCCL's watchdog prints its
        # timeout after any error of the GPU.
        return False
    if words.raised is not None:
        return _any_symptom(words.raised)
    by = ended_by(end)
    passed_on = by == "SIGTERM"  # torchrun ends the neighbours of a failed rank with SIGTERM
    aborted = by == "SIGABRT" and _any_symptom(last_words(words.said, signal.SIGABRT))
    return (passed_on and end.exit_code != exit_codes.CHECKPOINTED) or aborted


def _any_symptom(text: Text) -> bool:
    own_trouble = set(text.numbers(NO_SYMPTOMS))
    return any(number not in own_trouble for number in text.numbers(SYMPTOMS))


@cache
def _that_stand_anywhere() -> tuple[FailureRule, ...]:
    return tuple(rule for rule in default_rules() if _stands(rule))


def _kills(rule: FailureRule, by: str) -> bool:
    """Whether a line that matches the rule can explain a signal from outside."""
    killed_for_memory = by == "SIGKILL" and rule.name == OUT_OF_MEMORY
    return _names(rule, by) or rule.scope == "scheduler" or killed_for_memory


def _stands(rule: FailureRule) -> bool:
    """Whether a line that matches the rule explains a crash wherever it is in the log. No rank
    survives broken hardware, the end of the job by the scheduler, or NCCL's watchdog, but it may
    then crash in another way. A warning may be old."""
    ends_it = rule.scope == "scheduler" or rule.name == WATCHDOG or is_broken_hardware(rule)
    return bool(rule.patterns) and ends_it


def _names(rule: FailureRule, by: str) -> bool:
    return not rule.patterns or by in rule.signals
