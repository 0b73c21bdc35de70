"""Which lines at the end of a log tell why a rank ended: no frames of stacks, no old warnings."""

import signal

from orchestrator.diagnosis.patterns import Text

ABORTS = (
    r"terminate called|terminating due to uncaught|^\s*what\(\):|pure virtual method called",
    r"Fatal (Python|glibc) error|thread terminated with exception|Assertion .*failed|Check failed:",
    r"(free|malloc|realloc|munmap_chunk|malloc_consolidate|calloc)\(\): |double free or corruption",
    r"corrupted (size|double-linked list|unsorted chunks)",
    r"(stack smashing|buffer overflow) detected|^\[F(\d+ | \S+\.cpp:)",
    r"watchdog caught collective|detected by watchdog|watchdog got stuck",
    r"NCCL operations have failed or timed out",
)
"""How the last words of a process begin that aborts."""
BEFORE_ABORTS = (
    r"\bNCCL WARN\b.*(Got completion|Cuda failure|Failed to CUDA|Connection closed by remote)",
    r"Memory access fault by GPU|HW Exception by GPU",
    r"Received a dump signal|preparing to dump debug info",
)
"""… and what is said before the end where nothing of it is."""
CRASHED = ("Fatal Python error:",)
TRACEBACK = (r"^(.{0,60}\W)?Traceback \(most recent call last\):\s*$",)
PASSED_ON = (r"ChildFailedError|CalledProcessError|elastic\S*SignalException",)
"""What a launcher raises of a process that failed, below the end of the process's own log."""
CHAINED = ("During handling of the above|above exception was the direct cause",)
"""Before a traceback that goes on from the one above it …"""
IGNORED = ("Exception ignored (in|on)",)
"""… before one that ended nothing …"""
ASIDE = (*IGNORED, "^Exception in thread ")
"""… or no more than a thread."""
WARNED = (r"^\[W(\d+ | \S+\.cpp:)",)
NCCL = ("nccl",)
NCCL_WARN = (r"\bNCCL WARN\b",)
"""What NCCL calls a warning is why a call of it fails a moment later."""

FRAMES = (
    r"^\s*frame #\d+: ",
    r"^\s*#\d+ +(0x[0-9a-f]+|<signal handler called>|[\w:~<>*&, ]+\()",
    r"^\s*@ +0x[0-9a-f]+ ",
    r"^[^\s:()]+\([^()]*\) ?\[0x[0-9a-f]+\]$",
    r"^\s*\d+ +0x[0-9a-f]+ ",
    r'^\s*File "[^"]*", line \d+(, in |$| in )',
    r"^\s+[~^]+\s*$",
    r"^\s*\[Previous line repeated \d+ more times?\]",
)
"""Lines of stacks: of C++ as torch, gdb, glog, glibc and UCX write them, and of Python."""
PYTHON_FRAME = (r'^\s*File "[^"]*", line \d+, in ',)
CODE_THAT_TELLS = (
    r"_multiprocessing\.SemLock\(",
    r'/multiprocessing/(reductions|resource_sharer)\.py", line',
)
"""A semaphore is a file in /dev/shm, and a connection one to a loader's worker: which exceptions do
not say."""

QUOTED = (
    r"""^[\w .:/#\[\]()-]{0,60}[{\[]\s*["'][\w.\- ]+["']\s*:""",
    r"""^[\w .#/-]{1,40}[:=]\s*(?:'[^']*'|"[^"]*")[,.]?\s*$""",
    r"""^\s*(?:'[^']*'|"[^"]*"),?\s*$""",
)
"""Options and data that a program shows, whose words are of another failure or of none …"""
SAID = (
    r"""["'](level|severity|levelname|lvl)["']\s*:\s*["'](error|fatal|critical)""",
    r"""^[^"':=]{0,40}(error|exception|reason|msg|message|cause|failed|failure|fatal|exit)\s*[:=]""",
    r"""["'](error|exception|exc_info|reason|failure)["']\s*:""",
)
"""… but for a line of a log in JSON, and for words that a program quotes as its reason."""

NOISE = (
    r"^wandb: ",
    r"\bNCCL (INFO|TRACE|VERSION)\b",
    r"\b(Retrying \(Retry\(|retrying in \d|will retry|retry(ing)? \d+/\d+|Retry attempt)",
    r"\b\w*Warning: |^\s*warnings\.warn\(",
    r"^\[W(\d+ | \S+\.cpp:)|^W\d{4} \d\d:\d\d",
    r"^\S* ?\[?\d{4}-\d\d-\d\d[T ][\d:,.+Z]+\]?[^\n]{0,60}\b(INFO|DEBUG|WARNING)\b",
    r"^\[?(INFO|DEBUG|WARNING)\b",
)
"""What a program says of things that it got over or that are no trouble …"""
TROUBLE = (
    r"NCCL INFO .*socket\w*Connect\b.*(No route|timed out|refused|unreachable)",
    r"NCCL INFO .*(async (fatal )?event|with (error|status) |Cuda failure)",
    r"cannot be retrieved \(gai error",
    r"CUDA initialization: .*system not yet initialized",
)
"""… but for these, which NCCL says of what ends it."""

PROGRESS = (
    r"\bstep\b\W{0,3}\d+.*\bloss\b\W{0,4}\d",
    r"\biter(ation)?\b\W{0,3}\d+.*\bloss\b\W{0,4}\d",
    r"'loss': '?\d",
)
"""A step of training was made."""
STEPS = 3
"""Made after a line, and it tells nothing of the end; one or two more may be of other ranks."""


def without_frames(text: Text) -> Text:
    """Without the frames of stacks, and the code that Python shows below its own."""
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


def frames_that_tell(text: Text) -> Text:
    return text.pick(text.numbers(CODE_THAT_TELLS))


def _indent(line: bytes) -> int:
    return len(line) - len(line.lstrip())


def without_quotations(text: Text) -> Text:
    quoted = set(text.numbers(QUOTED))
    return text.without(quoted - set(text.numbers(SAID))) if quoted else text


def without_noise(text: Text) -> Text:
    noise = set(text.numbers(NOISE))
    return text.without(noise - set(text.numbers(TROUBLE))) if noise else text


def before_steps_dropped(text: Text) -> Text:
    """Without what was said before a few more steps were made: the rank outlived it."""
    steps = list(text.numbers(PROGRESS))
    return text.since(steps[-STEPS]) if len(steps) >= STEPS else text


def last_words(text: Text, ended_by: int | None) -> Text:
    """What a rank said as it ended, from where that begins: no old warning is among it. One that
    left by itself without a traceback may have said why in any line that is no mere notice."""
    if ended_by == signal.SIGABRT:
        begins = text.first(ABORTS)
        if begins == len(text.lines):
            begins = text.first(BEFORE_ABORTS)
        return _unwarned(_without(ASIDE, text.since(begins)))
    if ended_by is not None:
        begins = text.first(CRASHED)
        return text.pick(range(begins, min(begins + 1, len(text.lines))))
    text = _without_launchers(text)
    heard = _without(ASIDE, text)
    if not heard.has(TRACEBACK):
        return without_noise(_without(IGNORED, text))
    begins = _raised_at(heard)
    raised = without_noise(heard.since(begins))
    if not raised.has(NCCL):
        return raised
    # NCCL says in a warning what went wrong, and PyTorch raises no more than that it did.
    warned = [number for number in heard.numbers(NCCL_WARN) if number < begins]
    return without_noise(heard.pick([*warned, *range(begins, len(heard.lines))]))


def _unwarned(text: Text) -> Text:
    """Without torch's own warnings, as of a store that a peer left: those end nothing."""
    return text.without(set(text.numbers(WARNED)))


def _without(begins: tuple[str, ...], text: Text) -> Text:
    """Without the tracebacks that come after such a line, each to what was raised at its end."""
    aside = set(text.numbers(begins))
    if not aside:
        return text
    chained, tracebacks = set(text.numbers(CHAINED)), set(text.numbers(TRACEBACK))
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
    """Without what a launcher raises of its processes; what it says of their ends stays."""
    passed_on = set(text.numbers(PASSED_ON))
    theirs = [number for number in text.numbers(TRACEBACK) if number + 1 in passed_on]
    return text.without({*theirs, *(number + 1 for number in theirs)}) if theirs else text


def _raised_at(text: Text) -> int:
    """Where the last traceback begins, with those that led to it."""
    chained = set(text.numbers(CHAINED))
    found = 0
    for number in text.numbers(TRACEBACK):
        if not any(before in chained for before in range(number - 3, number)):
            found = number
    return found
