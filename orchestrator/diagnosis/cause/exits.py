"""What one exit of a rank, or one line of a kernel, means: its kind, its class and its text."""

import re
import signal
from collections import Counter

from msgspec.structs import replace

from orchestrator.contract.files import exit_codes
from orchestrator.contract.messages.events import RankExited
from orchestrator.contract.spec.failures import FailureRule, Reading, Scope
from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.verdict import NOBODY, Culprit, Evidence, Verdict
from orchestrator.diagnosis.hang.post_mortem import CLASS as MISMATCH

FIX = "\n  fix: "
"""Text before the fix in the message of an `NdctlError`."""
MOST_SAID = 400
"""Characters of an exception that a cause has: the message of torch for a full GPU has as many."""
DISK_FULL = "disk-full"
"""Kind and class of a trainer that refuses to start because the disk of the run directory is full.
"""
NOT_SAVED = "CheckpointNotSaved"
"""The trainer's exception after a failed save."""
EARLY = "ended-early"
"""Kind and class of a rank that returned 0 before the last step."""
ENDED_FIRST = "ended-first"
"""Kind and class of a rank of the user's program that returned 0 before others had finished."""
CONNECTION_LOST = "connection-lost"
"""Kind of ranks that lost a peer, when none is known to have ended."""
OUT_OF_MEMORY = "host-out-of-memory"
LOADER_KILLED = "loader-worker-killed"
CRASHED = "segfault"
"""The class of lines about a process that crashed."""
PYTHON = "python-exception"
BY_SHELL = 128
"""A shell exits with this plus the number of the signal that ended its child."""
SHARED: tuple[Scope, ...] = ("fabric", "storage")
"""Scopes of failures that hosts share."""
CRASHES = frozenset({signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT})
"""Neither a network nor a file system ends a process by these signals. A file system does by
SIGBUS, if the process had a file mapped."""
# These patterns backtrack over at most one word of a line.
ERROR = re.compile(
    r"\b(fatal|failed|cannot|could not|unable to)\b|(error|exception)\b", re.IGNORECASE
)
NO_ERROR = re.compile(
    r"^\W*(Traceback|Exception (in thread|ignored))\b|\b(warn|warning|info|debug|wandb)\b"
    r"|\bNCCL\b|\[[WEI]\d+ |\b(0|no) (errors?|failures?)\b",
    re.IGNORECASE,
)
"""Headings, notices, and what libraries print while a process ends."""


def after_step(step: int) -> str:
    """When something happened, as the end of a sentence. A program may report no steps."""
    return f"after step {step}" if step else "before any step was reported"


def signal_name(number: int | None) -> str | None:
    if number is None:
        return None
    try:
        return signal.Signals(number).name
    except ValueError:
        # Most real-time signals have no name in Python.
        return f"signal {number}"


def kind_of(exit_code: int | None, number: int | None, *, raised: bool) -> str:
    """The kind of incident for such an exit; `number` is the signal's."""
    # The order of these checks matters: the trainer's own codes say more than a signal or an
    # exception that came with them.
    if exit_code == exit_codes.REFUSED:
        return "refused"
    if exit_code == exit_codes.OK:
        return EARLY
    # An exception that was recorded explains the exit better than the signal that ended the process
    # after it.
    if raised:
        return "exception"
    if number is not None:
        return "rank-killed"
    if exit_code == exit_codes.CHECKPOINTED:
        return "rank-stopped"
    # No code and no signal: the process that would have collected them is gone, too.
    return "rank-lost" if exit_code is None else "rank-exited"


def exited_verdict(exited: RankExited, hardware: Reading | None) -> Verdict:
    """What this exit means. `hardware`: the line of the host's kernel that explains it, if any."""
    culprit = Culprit(host=exited.host, rank=exited.rank)
    found = hardware or failure_of(exited)
    # The line of the kernel comes first, because it outweighs what the rank printed.
    seen = (f"the kernel of {exited.host}: {hardware.line}",) if hardware else ()
    evidence = Evidence(
        rank=exited.rank,
        exit_code=exited.exit_code,
        signal=signal_name(exited.signal),
        log_tail=exited.log_tail,
        traceback=exited.error.traceback if exited.error else "",
        notes=(*seen, *class_notes(found), *_snapshot_notes(exited)),
    )
    if exited.above in ("torchrun", "launcher"):
        culprit = Culprit(host=exited.host)  # that process serves all ranks of the host
    kind, cause, signature = name_of(exited)
    if hardware is not None:
        # The program is not at fault, so a second failure is not a repeated error of the program.
        cause, signature = f"{hardware.name} on {exited.host}; {cause}", ""
    elif exited.exit_code == exit_codes.REFUSED:
        # Every rank refuses the same configuration, so the order in which they are heard is chance.
        # The traceback shows ndctl's own code, and the log repeats the message: both are left out.
        culprit, evidence = NOBODY, replace(evidence, log_tail=(), traceback="", notes=())
    elif _fails_alike(exited):
        culprit = NOBODY  # the first one to exit is chance
    return Verdict(
        kind=kind,
        cause=cause,
        culprit=culprit,
        at=exited.at,
        detected_after_s=exited.detected_after_s,
        evidence=evidence,
        signature=signature,
        final=exited.exit_code == exit_codes.REFUSED,
        failure=found,
        phase=exited.phase,
        fix=_fix_of(exited) if exited.exit_code == exit_codes.REFUSED else "",
    )


def _fails_alike(exited: RankExited) -> bool:
    """All ranks end like this one: they have the same loss, or one of them could not save."""
    unsaved = exited.error is not None and exited.error.error == NOT_SAVED
    return exited.exit_code == exit_codes.UNSTABLE or unsaved


def _snapshot_notes(exited: RankExited) -> tuple[str, ...]:
    if exited.error is None or not exited.error.memory_snapshot:
        return ()
    return (
        f"GPU memory of rank {exited.rank}, for pytorch.org/memory_viz:"
        f" {exited.error.memory_snapshot}",
    )


def _fix_of(exited: RankExited) -> str:
    # The trainer's error text carries the fix, and the report shows it in a place of its own.
    return exited.error.message.partition(FIX)[2].strip() if exited.error else ""


def failure_of(exited: RankExited) -> Reading | None:
    """The failure class, as the agent of the rank's host classified it; None where no class fits,
    or where no agent classified the exit."""
    return exited.reading.failure if exited.reading else None


def is_mismatch(exited: RankExited) -> bool:
    """The rank was aborted because the collectives that ranks called did not match."""
    found = failure_of(exited)
    return not exited.stopped and found is not None and found.name == MISMATCH


def has_mismatch(findings: Findings) -> bool:
    return any(is_mismatch(exited) for exited in findings.exits)


def breaks_its_host(exited: RankExited) -> bool:
    """The rank reported an error that only broken hardware of its host causes."""
    found = failure_of(exited)
    return found is not None and is_broken_hardware(found)


def is_broken_hardware(rule: FailureRule | Reading) -> bool:
    """Only a broken host can say this; of the classes with scope host, those that replace it."""
    return rule.scope == "host" and rule.action == "replace"


def asked_to_leave(exited: RankExited) -> bool:
    """The rank exited as a rank does that got SIGTERM."""
    return exited.exit_code == exit_codes.CHECKPOINTED or exited.signal == signal.SIGTERM


def timed_out(exited: RankExited) -> bool:
    """The rank exited because a collective took too long."""
    return exited.reading is not None and exited.reading.timed_out


def class_notes(found: Reading | None) -> tuple[str, ...]:
    if found is None:
        return ()
    return (f"class {found.name} (scope {found.scope}): {found.advice}",)


def name_of(exited: RankExited) -> tuple[str, str, str]:
    """Kind, cause and signature of one exit."""
    raised = exited.error is not None
    kind = (
        ENDED_FIRST
        if exited.ended_first
        else kind_of(exited.exit_code, exited.signal, raised=raised)
    )
    found = failure_of(exited)
    if kind == "refused" and found is not None and found.name == DISK_FULL:
        kind = DISK_FULL
    cause, signature = _cause(kind, exited)
    return kind, cause, signature


def _cause(kind: str, exited: RankExited) -> tuple[str, str]:
    """Cause and signature."""
    unstable = exited.exit_code == exit_codes.UNSTABLE
    # An empty signature: the refusal is final already, so no repetition is counted.
    if kind in ("refused", DISK_FULL):
        text = exited.error.message.partition(FIX)[0] if exited.error else _last_line(exited)
        what = "the disk is full" if kind == DISK_FULL else "the trainer refused its configuration"
        return f"{what}: {text}", ""
    if kind in (EARLY, ENDED_FIRST):
        words = f"rank {exited.rank} ended with exit code 0 {after_step(exited.step)}"
        # The signature: a program of the user that does the same again has a bug.
        return (words, "") if kind == EARLY else (f"{words}, before the others", words)
    if exited.error is not None:
        at = f" at step {exited.error.step}" if exited.error.step else ""
        text, signature = _in_a_sentence(exited.error.said), f"{exited.error.said}{at}"
        if _fails_alike(exited):
            first = f"(rank {exited.rank} reported it first)"
            return f"all ranks failed alike: {text} {first}", signature
        return f"rank {exited.rank} raised {text}{at}", signature
    # The signal hit torchrun or the launcher above the rank, and the rank died with it.
    if exited.above is not None:
        what = f"the {exited.above} of rank {exited.rank}"
        return f"{what} was killed by {signal_name(exited.signal)}", ""
    # An empty signature: a kill says nothing about the program, so a second one is no repeated
    # error.
    if kind == "rank-killed":
        return f"rank {exited.rank} was killed by {signal_name(exited.signal)}", ""
    if kind == "rank-stopped":
        return f"rank {exited.rank} got a signal from outside, saved a checkpoint and exited", ""
    if kind == "rank-lost":
        return f"rank {exited.rank} vanished together with its keeper", ""
    if unstable:
        first = f"(rank {exited.rank} first)"
        return f"all ranks exited with code {exit_codes.UNSTABLE} {first}", ""
    words = f"rank {exited.rank} exited with code {exited.exit_code}"
    said = _last_error(exited)
    return (f"{words}; its last error: {_in_a_sentence(said)}" if said else words), ""


def _last_error(exited: RankExited) -> str:
    """The last error in the log of a rank that reported none, if no known message gave it its
    class; empty if there is none. For example the text of `sys.exit("the vocabulary is empty")`."""
    found = failure_of(exited)
    if found is None or (found.line and found.name != PYTHON):
        return ""
    lines = (line.strip() for line in reversed(exited.log_tail))
    return next((one for one in lines if ERROR.search(one) and not NO_ERROR.search(one)), "")


def _in_a_sentence(said: str) -> str:
    """An exception without the middle of a very long message, which hides what the sentence says
    after it. The traceback has all of it. A fix stays, because it has a row of its own."""
    what, before_fix, fix = said.partition(FIX)
    if len(what) > MOST_SAID:
        half = MOST_SAID // 2
        what = f"{what[:half]} … {what[-half:]}"
    return f"{what}{before_fix}{fix}"


def _last_line(exited: RankExited) -> str:
    return exited.log_tail[-1] if exited.log_tail else "see its log"


def broken_hosts(findings: Findings) -> dict[str, Reading]:
    """Host -> the line of its kernel about broken hardware, logged while the attempt ran."""
    return {
        host: first
        for host, lines in kernel_lines(findings).items()
        if (first := next((one for one in lines if one.scope == "host"), None))
    }


def kernel_lines(findings: Findings) -> dict[str, tuple[Reading, ...]]:
    """Host -> the classified lines of its kernel.

    A network or storage error that the kernels of several hosts log comes from what they share, so
    it is left out of all of them.
    """
    found = {part.host: part.readings for part in findings.evidence if part.kernel}
    times = Counter(one.name for lines in found.values() for one in lines)
    return {
        host: tuple(one for one in lines if one.scope not in SHARED or times[one.name] == 1)
        for host, lines in found.items()
    }


def explained_by_kernel(lines: tuple[Reading, ...], exited: RankExited) -> Reading | None:
    """The line of the host's kernel that explains this exit better than the rank itself does.

    Pids are not compared: the kernel has the host's pids, and a rank those of its container.
    """
    rank = failure_of(exited)
    return next((one for one in lines if _explains(one, exited, rank)), None)


def _explains(line: Reading, exited: RankExited, rank: Reading | None) -> bool:
    # A rank that got SIGTERM left because someone asked it to, so a line about a slow disk is not
    # its reason.
    asked = asked_to_leave(exited)
    if line.scope == "host" or line.own:
        own_fault = rank is not None and rank.scope == "user"
        # Example: a rank raises "shapes differ" on a host whose kernel logs a CPU stall. The stall
        # is not the cause. But a line that asks to replace the host (broken memory, a lost GPU) is.
        another = own_fault or (asked and not line.own)
        return line.action == "replace" or not another
    # The kernel kills by SIGKILL if memory is short, and a process that crashes by another signal.
    killed = signal.SIGKILL in (exited.signal, (exited.exit_code or 0) - BY_SHELL)
    if line.name == OUT_OF_MEMORY:
        asked_first = exited.signal == signal.SIGTERM and "SIGTERM" in line.line  # earlyoom
        of_worker = rank is not None and rank.name == LOADER_KILLED
        return killed or asked_first or of_worker
    # All groups of a machine share its log: the process of another job or pod crashed, or one of
    # this job that is no rank.
    if line.name == CRASHED and killed:
        return False
    # Example: Xid 45 is logged while the driver cleans up after any exit, so it is not a cause.
    if line.symptom or line.action == "stop" or asked:
        return False
    if rank is None or not rank.line:
        # The rank said nothing of its own. A crash is not the fabric's or the storage's doing.
        return line.scope not in SHARED or exited.signal not in CRASHES
    # The rank reported only that a peer or the network was lost. A line about fabric or storage
    # explains that; the rank's own error stands in all other cases.
    return rank.symptom and line.scope in SHARED
