"""`require` checks a law; it raises `LawViolated` if the law is broken."""

from orchestrator.job.state import Run


class LawViolated(AssertionError):
    """A law was broken."""


def require(condition: bool, violation: str) -> None:
    """`violation`: the message of `LawViolated`, which says what happened instead."""
    if not condition:
        raise LawViolated(violation)


def reached(run: Run) -> int:
    """The newest step of a checkpoint on disk, or from which ranks resumed in memory: progress."""
    return max(run.progress.saved, run.progress.remembered)
