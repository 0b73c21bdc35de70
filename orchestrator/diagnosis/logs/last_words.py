"""Picks the lines at the end of a log that tell why a rank ended, without stacks or old
warnings."""

import signal
from collections.abc import Iterator

from orchestrator.diagnosis.logs.patterns import Text

ABORTS = (
    r"terminate called|terminating due to uncaught|^\s*what\(\):|pure virtual method called",
    r"Fatal glibc error|Fatal Python error: ([^A]|A[^b])|thread terminated with exception",
    r"Assertion .*failed|Check failed:",
    r"(free|malloc|realloc|munmap_chunk|malloc_consolidate|calloc)\(\): |double free or corruption",
    r"corrupted (size|double-linked list|unsorted chunks)",
    r"(stack smashing|buffer overflow) detected|^\[F(\d+ | \S+\.cpp:)",
    r"watchdog caught collective|detected by watchdog|watchdog got stuck",
    r"NCCL operations have failed or timed out",
    r"^DeepEP .*timeout",  # a kernel prints it before it ends itself, which aborts the process
)
"""First words of a process that aborts."""
BEFORE_ABORTS = (
    r"\bNCCL WARN\b.*(Got completion|Cuda failure|Failed to CUDA|Connection closed by remote)",
    r"Memory access fault by GPU|HW Exception by GPU",
    r"Received a dump signal|preparing to dump debug info",
)
"""Messages shortly before an abort, used if the process itself printed none of `ABORTS`."""
REPORTED = (
    r"^Fatal Python error: Aborted",
    r"^\*\*\* (SIGABRT received|Process received signal|Aborted at)",
    r"^Signal: Aborted",
)
"""What a signal handler prints about SIGABRT. The reason of the abort stands above it."""
COMPLAINTS = (
    r"\b(errors?|err|fatal|fail(ed|ure)?|unable|cannot|could not|abort(ed|ing)?|assert\w*)\b",
    r"\b(exceeded|timed out|timeout|lost|refused|unreachable|invalid|illegal|corrupt\w*)\b",
)
LAST = 4
"""Number of last lines in which complaints are searched."""
LIMITS = (
    r"Resource temporarily unavailable|RLIMIT_|ulimit|Too many open files|No space left on device",
    r"Cannot allocate memory|bad_alloc",
)
"""Messages of a library that was refused a resource and then crashes because of it."""
CRASHED = ("Fatal Python error:",)
TRACEBACK = (r"^(.{0,60}\W)?Traceback \(most recent call last\):\s*$",)
OF_A_WORKER = (r"^Original Traceback",)
"""Heading of a traceback that is part of the one another process raised."""
PASSED_ON = (r"ChildFailedError|CalledProcessError|elastic\S*SignalException",)
"""Exceptions that a launcher raises about a failed process, below the process's own log."""
OF_A_TOOL = ("CalledProcessError",)
"""Exceptions of `PASSED_ON` that a program also raises about a tool that it runs."""
CHAINED = ("During handling of the above|above exception was the direct cause",)
"""Line between a traceback and the one that follows from it."""
IGNORED = ("Exception ignored (in|on)",)
"""Line before the traceback of an exception that ended nothing."""
ASIDE = (*IGNORED, "^Exception in thread ")
"""Line before the traceback of an exception that ended nothing, or only a thread."""
POINTS_BACK = (
    r"CheckpointException ranks:dict_keys\(\[\]\)|background workers are no longer alive",
    r"\b(see|look at|look up to see|check|refer to|read)\b[^.]{0,40}"
    r"\b(above|logs?|traceback|root cause|output|previous)\b",
    r"\b(above|previous|earlier|original|underlying) (error|exception|traceback|message|failure)",
    r"\b(workers?|child(ren)?|subprocess(es)?|process(es)?|actors?|engine|thread|task|launcher)\b"
    r"[^.:]{0,60}\b(died|dead|crashed|terminated|exited|failed|was killed|aborted|ended)\b",
    r"\btimed out\b|\bTimeoutError\b",
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|BrokenProcessPool|SystemExit",
    r"returned non-zero exit status|non-zero (exit|return) (code|status)",
)
"""An exception that only says that something failed earlier. The reason stands further up."""
OF_LIBRARIES = (r"\bNCCL WARN\b|\bUCX +[A-Z]+\b|^wandb: |^\[[WEI](\d+ | \S+\.cpp:)",)
"""Lines that a library prints by itself, so that they are no part of an exception's message."""
LOGGED = (r"\b(warn(ing)?|error|critical|fatal|exception)\b",)
"""A line before a traceback that a program logs, perhaps because it survives the exception."""
CLEANUP = (r'multiprocessing/util\.py", line \d+, in _(run_finalizers|exit_function)',)
"""Frame of a process that is cleaning up at its end. An exception there ends nothing."""
WARNED = (r"^\[W(\d+ | \S+\.cpp:)",)
NCCL = ("nccl",)
NCCL_WARN = (r"\bNCCL WARN\b",)
"""NCCL prints the reason of a failing call as a warning, just before the call fails."""
LAST_ERROR = (r"(^|\s)Last error:\s*$",)
"""Below this line, an exception of PyTorch repeats NCCL's last warning."""

FRAMES = (
    r"^\s*frame #\d+: |^Exception raised from .*\(most recent call first\):$",
    r"^\s*#\d+ +(0x[0-9a-f]+|<signal handler called>|[\w:~<>*&, ]+\()",
    r"^\s*@ +0x[0-9a-f]+ ",
    r"^[^\s:()]+\([^()]*\) ?\[0x[0-9a-f]+\]$",
    r"^\s*\d+ +0x[0-9a-f]+ ",
    r'^\s*File "[^"]*", line \d+(, in |$| in )',
    r"^\s+[~^]+\s*$",
    r"^\s*\[Previous line repeated \d+ more times?\]",
)
"""Lines of stacks: of C++ as torch, gdb, glog, glibc and UCX print them, and of Python."""
PLACES = (r"^ *raised in ",)
"""Lines that `raised_in` writes in place of an innermost frame."""
PYTHON_FRAME = (r'^\s*File "[^"]*", line \d+, in ',)
CODE_THAT_TELLS = (
    r"_multiprocessing\.SemLock\(",
    r'/multiprocessing/(reductions|resource_sharer)\.py", line',
)
"""Frames that say what their exception does not: a semaphore is a file in /dev/shm, and a
connection may be one to a worker of a data loader."""

QUOTED = (
    r"""^[\w .:/#\[\]()-]{0,60}[{\[]\s*["'][\w.\- ]+["']\s*:""",
    r"""^[\w .#/-]{1,40}[:=]\s*(?:'[^']*'|"[^"]*")[,.]?\s*$""",
    r"""^\s*(?:'[^']*'|"[^"]*"),?\s*$""",
)
"""Options and data that a program prints. Their words may describe another failure or none."""
SAID = (
    r"""["'](level|severity|levelname|lvl)["']\s*:\s*["'](error|fatal|critical)""",
    r"""^[^"':=]{0,40}(error|exception|reason|msg|message|cause|failed|failure|fatal|exit)\s*[:=]""",
    r"""["'](error|exception|exc_info|reason|failure)["']\s*:""",
)
"""Quotations that do report a failure: a log line in JSON, and text quoted as the reason."""

NOISE = (
    r"^wandb: +([^E]|E[^R])",
    r"\bNCCL (INFO|TRACE)\b|^NCCL version \d",
    r"\b(Retrying \(Retry\(|retrying in \d|will retry|retry(ing)? \d+/\d+|Retry attempt)",
    r"\b\w*Warning: |^\s*warnings\.warn\(",
    r"^\[W(\d+ | \S+\.cpp:)|^W\d{4} \d\d:\d\d",
    r"^\S* ?\[?\d{4}-\d\d-\d\d[T ][\d:,.+Z]+\]?[^\n]{0,60}\b(INFO|DEBUG|WARNING)\b",
    r"^\s*\[?(INFO|DEBUG|WARNING)\b",
)
"""Messages about things that a program survived or that are no problem."""
TROUBLE = (
    r"^\s*Warning\s+[A-Z][A-Za-z]+\s",  # an event of Kubernetes
    r"\b(exiting|aborting|giving up|quitting)\b",
    r"NCCL INFO .*socket\w*Connect\b.*(No route|timed out|refused|unreachable)",
    r"NCCL INFO .*(async (fatal )?event|with (error|status) |Cuda failure)",
    r"cannot be retrieved \(gai error",
    r"CUDA initialization: .*system not yet initialized",
)
"""Lines that look like `NOISE` but are printed about what ends a process."""

PROGRESS = (
    r"\bstep\b\W{0,3}\d+.*\bloss\b\W{0,4}\d",
    r"\biter(ation)?\b\W{0,3}\d+.*\bloss\b\W{0,4}\d",
    r"'loss': '?\d",
)
"""Lines that show that a training step was done."""
COUNTED = (*PROGRESS, r"^\W*(step|iter(ation)?)\W{0,3}\d+\b")
"""The same, for ranks that print the step but not the loss."""
STEPS = 3
"""If so many steps were done after a line, the line does not explain the end. One or two may have
been done by other ranks."""


def without_frames(text: Text) -> Text:
    """The text without frames of stacks, and without the code that Python shows below frames."""
    frames = set(text.numbers(FRAMES))
    tells = set(text.numbers(CODE_THAT_TELLS)) if frames else set()
    python = set(text.numbers(PYTHON_FRAME))
    indent: int | None = None
    for number in range(len(text.lines)) if python else ():
        here = _indent(text.line(number))
        inside = indent is not None and here > indent
        if number in python:
            indent = here
        elif inside:
            frames.add(number)
        else:
            indent = None
    return text.without(frames - tells) if frames else text


def without_cleanup(text: Text) -> Text:
    """The text without tracebacks of finalizers, which fail on objects that are gone already."""
    frames = set(text.numbers(CLEANUP))
    if not frames:
        return text
    begins = set(_tracebacks(text))
    aside: set[int] = set()
    for begin in begins:
        end = begin + 1
        while end < len(text.lines) and end not in begins and text.line(end)[:1].isspace():
            end += 1
        if not frames.isdisjoint(range(begin, end)):
            aside.update(range(begin, end + 1))  # the traceback with its exception
    return text.without(aside)


def points_back(text: Text) -> bool:
    """Whether the last exception only refers to an earlier failure."""
    lines = [n for n in range(len(text.lines)) if text.line(n).strip()]
    return bool(lines) and text.pick(lines[-2:]).has(POINTS_BACK)


def frames_that_tell(text: Text) -> Text:
    return text.pick(text.numbers((*CODE_THAT_TELLS, *PLACES)))


def _indent(line: bytes) -> int:
    return len(line) - len(line.lstrip())


def without_quotations(text: Text) -> Text:
    quoted = set(text.numbers(QUOTED))
    return text.without(quoted - set(text.numbers(SAID))) if quoted else text


def without_noise(text: Text) -> Text:
    noise = set(text.numbers(NOISE))
    return text.without(noise - set(text.numbers(TROUBLE))) if noise else text


def before_steps_dropped(text: Text) -> Text:
    """The text without lines that were followed by several more steps: the rank survived them."""
    steps = list(text.numbers(PROGRESS))
    return text.since(steps[-STEPS]) if len(steps) >= STEPS else text


def last_words(text: Text, ended_by: int | None) -> Text:
    """What a rank printed as it ended, from the first line about its end on, without old warnings.

    A rank that exited by itself without a traceback may have given the reason in any line that is
    not merely a notice.

    Args:
        ended_by: the signal that ended the rank; None: it exited by itself.
    """
    if ended_by == signal.SIGABRT:
        # The process aborted itself: a C++ exception, an assertion, glibc or PyTorch's watchdog.
        begins = text.first(ABORTS)
        if begins == len(text.lines):
            begins = text.first(BEFORE_ABORTS)
        if begins == len(text.lines):
            return before_the_abort(text)
        said = _without(ASIDE, text.since(begins))
        return _unwarned(
            _warned_by_nccl(text, begins).followed_by(said) if said.has(NCCL) else said
        )
    if ended_by is not None:
        # Another signal leaves no message, but faulthandler's heading or a refused resource may
        # stand near the end.
        begins = text.first(CRASHED)
        crashed = text.pick(range(begins, min(begins + 1, len(text.lines))))
        end = _since_the_last_step(text).since(-LAST)
        return crashed.followed_by(end.pick(end.numbers(LIMITS)))
    text = _without_launchers(text)
    heard = _without(ASIDE, text)
    if not heard.has(TRACEBACK):  # for example sys.exit with a message
        return without_noise(_without(IGNORED, text))
    begins = _raised_at(heard)
    raised = without_noise(heard.since(begins))
    return _warned_by_nccl(heard, begins).followed_by(raised) if raised.has(NCCL) else raised


def uncaught(text: Text) -> Text | None:
    """The exception that ended a rank, without what libraries printed after it while the process
    ended; None if there is none, or if the rank may have survived it.

    A process that ends closes its connections, and its libraries print the loss of its peers.
    """
    heard = _without(ASIDE, _without_launchers(text))
    begins = _raised_at(heard)
    if not heard.has(TRACEBACK) or heard.pick(range(begins)[-1:]).has(LOGGED):
        return None
    raised = heard.since(begins)
    last = max(raised.numbers(TRACEBACK))
    below = (n for n in range(last + 1, len(raised.lines)) if not raised.line(n)[:1].isspace())
    exception = next(below, len(raised.lines))
    if raised.since(exception).has(COUNTED):
        return None
    printed = {n for n in raised.numbers(OF_LIBRARIES) if n > exception}
    alone = without_noise(raised.without(printed))
    return None if alone.has(NCCL) else alone  # NCCL's own exception is about its connections


def _warned_by_nccl(text: Text, begins: int) -> Text:
    """NCCL's warnings before the end. They say what went wrong; PyTorch only says that it did."""
    return without_noise(text.pick(n for n in text.numbers(NCCL_WARN) if n < begins))


def before_the_abort(text: Text) -> Text:
    """Complaints of a library that aborts without one of the known messages."""
    above = text.pick(range(text.first((*ABORTS, *REPORTED))))
    end = without_noise(_unwarned(_since_the_last_step(above))).since(-LAST)
    return end.pick(end.numbers(COMPLAINTS))


def _since_the_last_step(text: Text) -> Text:
    """The text after the last step. A process that did a step survived earlier complaints, and for
    lines that merely stand near the end, one step is enough to ignore them."""
    steps = list(text.numbers(COUNTED))
    return text.since(steps[-1]) if steps else text


def last_warning(text: Text) -> Text:
    """The last line, if it is a warning of torch."""
    spoken = [n for n in range(len(text.lines)) if text.line(n).strip()]
    end = text.pick(spoken[-1:])
    return end.pick(end.numbers(WARNED))


def with_warnings(text: Text) -> Text:
    """The text with NCCL's last warning in NCCL's own form, if an exception quotes it."""
    quoted = [number + 1 for number in text.numbers(LAST_ERROR) if number + 1 < len(text.lines)]
    lines = {n: (text.lines[n], b"NCCL WARN " + text.line(n).lstrip()) for n in quoted}
    return text.rewritten(lines) if lines else text


def _unwarned(text: Text) -> Text:
    """The text without torch's warnings, such as a store that a peer left: they end nothing."""
    return text.without(set(text.numbers(WARNED)))


def _without(begins: tuple[str, ...], text: Text) -> Text:
    """The text without tracebacks that follow such a line, each with the exception at its end."""
    aside = set(text.numbers(begins))
    if not aside:
        return text
    chained, tracebacks = set(text.numbers(CHAINED)), set(_tracebacks(text))
    heard = []
    inside = ended = False
    for number in range(len(text.lines)):
        bare = text.line(number)
        if number in aside or (ended and number in chained):
            inside, ended = True, False
        elif inside:
            ended = bool(bare.strip()) and not bare[:1].isspace() and number not in tracebacks
            inside = not ended
        elif bare.strip() or not ended:
            ended = False
            heard.append(number)
    return text.pick(heard)


def _without_launchers(text: Text) -> Text:
    """The text without exceptions of a launcher about its processes. Its other lines stay."""
    passed_on = set(text.numbers(PASSED_ON))
    if not passed_on:
        return text
    all_of_them = list(_tracebacks(text))
    theirs = [number for number in all_of_them if number + 1 in passed_on]
    if theirs == all_of_them:  # there is no traceback of the process, so keep those about tools
        tools = set(text.numbers(OF_A_TOOL))
        theirs = [number for number in theirs if number + 1 not in tools]
    return text.without({*theirs, *(number + 1 for number in theirs)}) if theirs else text


def _raised_at(text: Text) -> int:
    """Line where the last traceback begins, including the tracebacks that led to it."""
    chained = set(text.numbers(CHAINED))
    found = 0
    for number in _tracebacks(text):
        if not any(before in chained for before in range(number - 3, number)):
            found = number
    return found


def _tracebacks(text: Text) -> Iterator[int]:
    """Lines where a traceback begins."""
    parts = set(text.numbers(OF_A_WORKER))
    return (number for number in text.numbers(TRACEBACK) if number not in parts)
