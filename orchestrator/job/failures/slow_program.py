"""A hang of the user's own program that may have been a pause, and the option that gives it more
time.

ndctl learns the limit from the steps, and does not see what else such a program does.
"""

import math

from orchestrator.diagnosis.cause.findings import Findings
from orchestrator.diagnosis.cause.hang_event import judged_from
from orchestrator.diagnosis.cause.verdict import NOBODY, Verdict
from orchestrator.job.state import Run

OPEN = ("together", "not-known")
"""Verdicts on a hang that also fit a program that was only slow."""
KEY = "resilience.hang_timeout"
LONGER = 10
"""The suggested limit is this many times the one that was too short, and at least `LEAST_S`."""
LEAST_S = 60


def longer_limit(run: Run, findings: Findings, verdict: Verdict) -> str:
    """The option of `ndctl submit`; empty if the hang is of another kind or explained."""
    hang = findings.hang
    if hang is None or hang.phase != "train" or not run.is_own or verdict.culprit != NOBODY:
        return ""
    judged = findings.judged or judged_from(findings, hang.attempt)
    if judged.verdict not in OPEN:
        return ""
    return f"--set {KEY}={max(LEAST_S, math.ceil(LONGER * hang.limit_s))}"


def slow_or_stuck(option: str, advice: str) -> str:
    """`advice`, and what to do if the program was only slow."""
    slow = f"if the program was slow and not stuck, submit it with {option}"
    return f"{advice}; {slow}, or with more than its longest pause"
