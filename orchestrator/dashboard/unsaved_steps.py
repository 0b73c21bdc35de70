"""What a job loses when it ends while its checkpoints cannot be saved."""

from orchestrator.contract.files.last_metric import last_reached
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.dashboard import format
from orchestrator.dashboard.job_view.replay import read_state


def at_risk(run_dir: RunDir) -> str:
    """What is lost if the next save fails as the last one did; empty: the last save succeeded."""
    return _unsaved(run_dir, "if they cannot save now either, ")


def lost(run_dir: RunDir) -> str:
    """What an ended job lost because its last save failed; empty: nothing."""
    return _unsaved(run_dir, "")


def repeated(run_dir: RunDir) -> str:
    """Where a resume of a job that ended without a last checkpoint starts, and what it repeats;
    empty: ndctl knows no step or, for a program that saves by itself, no checkpoint."""
    state, reached = read_state(run_dir), last_reached(run_dir.metrics)
    own = state.run.job is not None and state.run.job.run is not None
    if reached is None or (own and not state.checkpoint.step):
        return ""
    return _resumes(state.checkpoint.step, reached.step)


def _unsaved(run_dir: RunDir, condition: str) -> str:
    """How saves fail, and, under the condition, where a resume starts and what it repeats."""
    known = read_state(run_dir).checkpoint
    if known.failed is None:
        return ""
    last = "the last save" if known.failed.times == 1 else f"the last {known.failed.times:,} saves"
    reached = last_reached(run_dir.metrics)
    # The metrics file may be on the same full disk and stop too, so take the later step.
    done = max(known.failed.step, reached.step if reached else 0)
    why = format.shorten(known.failed.why)
    return f"{last} failed ({why}); {condition}{_resumes(known.step, done)}"


def _resumes(saved: int, done: int) -> str:
    start = f"from step-{saved}" if saved else "at step 0"
    return f"a resume starts {start} and repeats {format.count(max(0, done - saved), 'step')}"
