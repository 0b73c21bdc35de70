"""Which Slurm job a launch is: by the id that was written down, else by its comment or script.

What Slurm has of a job is seen by our own look at squeue and scontrol, never by submitit's: its
`done()` is true while a job is being queued again. Gone is only what slurmctld, twice asked, says
that it does not know.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.backends.slurm import advice, observe, render
from orchestrator.backends.slurm.commands import UNKNOWN_JOB, Slurm, refusal
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.read_json import read_json
from orchestrator.contract.whole import write_whole, written_beside
from orchestrator.errors import BackendError
from orchestrator.seams import Sighting

LOOK_AGAIN_S = 1.0
"""One empty answer is not to be believed; the second is taken after this."""
GLANCE_S = 4.0
"""For an answer to somebody who only looks."""


@dataclass(frozen=True, slots=True)
class Finder:
    slurm: Slurm

    def find(self, launch: LaunchPlan) -> SlurmJob | None:
        """The Slurm job of this launch; None when Slurm surely has none.

        Raises BackendError when that cannot be told.
        """
        if not render.script_path(launch).exists():
            return None  # it is written before anything is queued
        job = self._look(launch)
        if job is None:
            self.slurm.clock.sleep(LOOK_AGAIN_S)
            job = self._look(launch)
        return job

    def find_all(self, launch: LaunchPlan) -> tuple[SlurmJob, ...]:
        """Every job of this launch that is not over: an sbatch that was not answered may have made
        another. Raises BackendError when that cannot be told."""
        if not render.script_path(launch).exists():
            return ()
        living = self._living(launch)
        if not living:
            self.slurm.clock.sleep(LOOK_AGAIN_S)
            living = self._living(launch)
        return living

    def _living(self, launch: LaunchPlan) -> tuple[SlurmJob, ...]:
        jobs = {job.id: job for job in self._queue([launch]) if _is_of(job, launch)}
        noted = recorded(launch)
        shown = self.show(launch, noted) if noted is not None else None
        if shown is not None:
            jobs[shown.id] = shown
        return tuple(job for job in jobs.values() if not job.is_over)

    def _look(self, launch: LaunchPlan) -> SlurmJob | None:
        noted = recorded(launch)
        if noted is not None:
            return self.show(launch, noted)
        ours = _of(launch, self._queue([launch]))
        if ours is not None:
            record(launch, ours.id)
        return ours

    def show(self, launch: LaunchPlan, job_id: str, tries: int = 3) -> SlurmJob | None:
        argv = ["scontrol", "show", "job", "-a", "-o", job_id]
        done = self.slurm.ask(argv, tries=tries)
        if done.code != 0:
            if UNKNOWN_JOB.search(done.err):
                return None
            raise refusal(argv, done)
        # Job ids start again when a cluster is set up anew: another's is none of ours.
        return _of(launch, observe.parse_jobs(done.out))

    def glance(self, launches: Sequence[LaunchPlan]) -> list[Sighting]:
        """How each stands, for somebody who only looks: one question for all of them, two where
        one is missing, and no patience. Never raises."""
        try:
            found = self._glimpse(launches)
            if None in found:
                self.slurm.clock.sleep(LOOK_AGAIN_S)
                again = self._glimpse(launches)
                found = [new or old for new, old in zip(again, found, strict=True)]
        except BackendError as exc:
            return [
                Sighting(f"{name_of(one) or 'the job'}: {exc.message}", True) for one in launches
            ]
        return [_sighting(launch, job) for launch, job in zip(launches, found, strict=True)]

    def _glimpse(self, launches: Sequence[LaunchPlan]) -> list[SlurmJob | None]:
        jobs = self._queue(launches, "--states=all", tries=1, answer_s=GLANCE_S)
        return [_of(launch, jobs) for launch in launches]

    def _queue(
        self,
        launches: Sequence[LaunchPlan],
        *more: str,
        tries: int = 3,
        answer_s: float | None = None,
    ) -> tuple[SlurmJob, ...]:
        names = f"--name={','.join(sorted({render.job_name(one) for one in launches}))}"
        argv = ["squeue", "-h", "-a", names, *more, "-o", observe.SQUEUE_FORMAT]
        return observe.parse_queue(self.slurm.told(argv, tries=tries, answer_s=answer_s))


def _of(launch: LaunchPlan, jobs: Sequence[SlurmJob]) -> SlurmJob | None:
    """The newest of `jobs` that is this launch's; the recorded one before all others."""
    ours = [job for job in jobs if _is_of(job, launch)]
    noted = recorded(launch)
    return next((job for job in ours if job.id == noted), ours[-1] if ours else None)


def _is_of(job: SlurmJob, launch: LaunchPlan) -> bool:
    mark = render.mark(launch)
    marked = job.comment == mark or job.comment.startswith(f"{mark};")
    return marked or job.command == str(render.script_path(launch))


def _sighting(launch: LaunchPlan, job: SlurmJob | None) -> Sighting:
    if job is not None and not job.is_over:
        return Sighting(advice.standing_words(job), held=True)
    name = name_of(launch) if job is None else f"Slurm job {job.id}"
    if name is None:
        return Sighting(None, held=False)
    return Sighting(f"{name} has ended" + (f": {job.state}" if job else ""), held=False)


def name_of(launch: LaunchPlan) -> str | None:
    job_id = recorded(launch)
    return job_id and f"Slurm job {job_id}"


def recorded(launch: LaunchPlan) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(read_json(_record_path(launch).read_text())["job_id"])
    return None


def record(launch: LaunchPlan, job_id: str) -> None:
    write_whole(_record_path(launch), _record(job_id))


def claim(launch: LaunchPlan, job_id: str) -> str:
    """Record `job_id` unless another is recorded; the one that is then. One of two that ask at the
    same time gets it."""
    if (noted := recorded(launch)) is not None:
        return noted
    path = _record_path(launch)
    with written_beside(path, _record(job_id)) as fresh:
        try:
            path.hardlink_to(fresh)
        except FileExistsError:
            pass
        except PermissionError:  # of a file system without links: the last of two gets it
            fresh.replace(path)
    return recorded(launch) or job_id


def _record(job_id: str) -> bytes:
    return json.dumps({"job_id": job_id}).encode()


def _record_path(launch: LaunchPlan) -> Path:
    return Path(launch.run_dir) / "slurm" / f"launch-{launch.launch}.json"
