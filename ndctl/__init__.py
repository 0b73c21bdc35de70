"""The public Python package of ndctl.

A training script calls these, on every rank. Without ndctl (`python train.py`, `torchrun train.py`)
they do nothing special, so the lines can stay.

    ndctl.attempt                which start of the ranks this is, from 1
    ndctl.log(step, loss=…)      progress and metrics
    ndctl.phase("eval")          not a training step
    ndctl.latest_checkpoint()    where to resume
    ndctl.checkpoint(step)       save a checkpoint, all ranks together
    ndctl.save_in_memory(…)      keep a state in the memory of the host, after each step
    ndctl.load_from_memory()     the newest of them, after a restart
    ndctl.should_stop()          checkpoint now and leave

A notebook or another program calls these (docs/python.md).

    ndctl.submit("spec.yaml")    submit a job; returns a Job
    ndctl.run(["train.py"])      run your own program as a job
    ndctl.plan("spec.yaml")      how it would be split over ranks
    ndctl.job(name)              a job that exists; ndctl.jobs(): all of them

Names are imported when they are used. `import ndctl` takes about a millisecond.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ndctl.client.errors import BackendError, Error, JobError, PlanError, SpecError, WaitTimeout
    from ndctl.client.finding import job, jobs
    from ndctl.client.job import Job
    from ndctl.client.planning import plan
    from ndctl.client.submitting import run, submit
    from ndctl.client.values import Event, LogLine, Metric, Plan, Status
    from ndctl.rank.memory.kept import load_from_memory, save_in_memory
    from ndctl.rank.reporting import log, phase
    from ndctl.rank.resuming import latest_checkpoint
    from ndctl.rank.saving import CheckpointError, checkpoint
    from ndctl.rank.stopping import should_stop

    attempt: int

_SCRIPT = {
    "CheckpointError": "ndctl.rank.saving",
    "checkpoint": "ndctl.rank.saving",
    "latest_checkpoint": "ndctl.rank.resuming",
    "load_from_memory": "ndctl.rank.memory.kept",
    "log": "ndctl.rank.reporting",
    "phase": "ndctl.rank.reporting",
    "save_in_memory": "ndctl.rank.memory.kept",
    "should_stop": "ndctl.rank.stopping",
}
"""Names for scripts -> module that defines them. These modules need the standard library alone."""
_CLIENT = {
    "BackendError": "ndctl.client.errors",
    "Error": "ndctl.client.errors",
    "Event": "ndctl.client.values",
    "Job": "ndctl.client.job",
    "JobError": "ndctl.client.errors",
    "LogLine": "ndctl.client.values",
    "Metric": "ndctl.client.values",
    "Plan": "ndctl.client.values",
    "PlanError": "ndctl.client.errors",
    "SpecError": "ndctl.client.errors",
    "Status": "ndctl.client.values",
    "WaitTimeout": "ndctl.client.errors",
    "job": "ndctl.client.finding",
    "jobs": "ndctl.client.finding",
    "plan": "ndctl.client.planning",
    "run": "ndctl.client.submitting",
    "submit": "ndctl.client.submitting",
}
"""The same for notebooks and other programs."""
_HOMES = {**_SCRIPT, **_CLIENT}

__all__ = [
    "BackendError",
    "CheckpointError",
    "Error",
    "Event",
    "Job",
    "JobError",
    "LogLine",
    "Metric",
    "Plan",
    "PlanError",
    "SpecError",
    "Status",
    "WaitTimeout",
    "attempt",
    "checkpoint",
    "job",
    "jobs",
    "latest_checkpoint",
    "load_from_memory",
    "log",
    "phase",
    "plan",
    "run",
    "save_in_memory",
    "should_stop",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name == "attempt":
        from ndctl.rank.link import current

        return current().attempt
    if name not in _HOMES:
        raise _unknown(name)
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def _unknown(name: str) -> AttributeError:
    """The error of a script that was written for another version, or misspells a name."""
    text = f"module 'ndctl' has no attribute {name!r}"
    if name.startswith("_"):  # Python itself asks for it
        return AttributeError(text)
    from importlib import metadata

    installed = next(iter(metadata.distributions(name="ndctl")), None)
    version = f" ({installed.version})" if installed else ""
    for_scripts = ", ".join(sorted({*_SCRIPT, "attempt"}))
    return AttributeError(f"{text}; for scripts, ndctl{version} has {for_scripts}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
