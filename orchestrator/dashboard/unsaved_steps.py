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


def _unsaved(run_dir: RunDir, condition: str) -> str:
    """How saves fail, and, under the condition, where a resume starts and what it repeats."""
    known = read_state(run_dir).checkpoint
    if known.failed is None:
        return ""
    last = "the last save" if known.failed.times == 1 else f"the last {known.failed.times:,} saves"
    reached = last_reached(run_dir.metrics)
    # The metrics file may be on the same full disk and stop too, so take the later step.
    done = max(known.failed.step, reached.step if reached else 0)
    saved = f"from step-{known.step}" if known.step else "at step 0"
    steps = format.count(max(0, done - known.step), "step")
    why = format.shorten(known.failed.why)
    return f"{last} failed ({why}); {condition}a resume starts {saved} and repeats {steps}"
