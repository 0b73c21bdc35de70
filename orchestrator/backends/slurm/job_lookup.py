"""Find the Slurm job of a launch: by its recorded id, else by its comment or its script.

A job counts as gone only if slurmctld says twice that it does not know the job.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ndctl.rank.regular_file import read_regular
from orchestrator.backends.slurm import observe, pending_hints, render
from orchestrator.backends.slurm.commands import UNKNOWN_JOB, Slurm, refusal
from orchestrator.backends.slurm.observe import SlurmJob
from orchestrator.contract.files.atomic_write import write_whole, written_beside
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.read_json import read_json
from orchestrator.errors import BackendError
from orchestrator.inventory.slurm.hostlist import expand, fold
from orchestrator.seams import LaunchStatus

LOOK_AGAIN_S = 1.0
"""Seconds before the second query; one empty answer is not trusted."""
GLANCE_S = 4.0
"""Timeout for commands that only show the state."""
RESUME = {"SUSPENDED": "scontrol resume {id}", "STOPPED": "scancel --signal=CONT {id}"}
"""State of a stopped job -> the command that continues it. A suspended job gave its CPUs to others;
a stopped job keeps them."""

LAUNCH_FAILURE = "JobLaunchFailure"
"""Slurm's reason if a batch script could not be started."""


class Finder(Struct, frozen=True):
    slurm: Slurm
    any_job: bool = False
    """Accept a job by its id alone, even if it does not belong to the launch."""

    def find(self, launch: LaunchPlan) -> SlurmJob | None:
        """The Slurm job of this launch; None if Slurm certainly has none.

        Raises:
            BackendError: it is unknown.
        """
        if not _may_be_queued(launch):
            return None
        job = self._look(launch)
        if job is None:
            self.slurm.clock.sleep(LOOK_AGAIN_S)
            job = self._look(launch)
        return job

    def find_all(self, launch: LaunchPlan) -> tuple[SlurmJob, ...]:
        """All unfinished jobs of this launch. There may be two, because an sbatch that was not
        answered may have created one. Raises BackendError if it is unknown."""
        if not _may_be_queued(launch):
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
        jobs = observe.parse_jobs(done.out)
        if self.any_job:
            return next((job for job in jobs if job.id == job_id), None)
        # After a reinstallation of a cluster, the id may belong to another job.
        return _of(launch, jobs)

    def glance(self, launches: Sequence[LaunchPlan]) -> list[LaunchStatus]:
        """The state of each launch, for commands that only show it. Queries all jobs at once, a
        second time if one is missing, and with a short timeout. Never raises."""
        try:
            found = self._glimpse(launches)
            if None in found:
                self.slurm.clock.sleep(LOOK_AGAIN_S)
                again = self._glimpse(launches)
                found = [new or old for new, old in zip(again, found, strict=True)]
        except BackendError as exc:
            return [
                LaunchStatus(f"{name_of(one) or 'the job'}: {exc.message}", True)
                for one in launches
            ]
        return [
            _sighting(launch, self._with_since(job))
            for launch, job in zip(launches, found, strict=True)
        ]

    def _with_since(self, job: SlurmJob | None) -> SlurmJob | None:
        """squeue does not say since when a job is suspended."""
        if job is None or job.state not in RESUME:
            return job
        with contextlib.suppress(BackendError):
            argv = ["scontrol", "show", "job", "-a", "-o", job.id]
            said = observe.parse_jobs(self.slurm.told(argv, tries=1, answer_s=GLANCE_S))
            return next((replace(job, since=one.since) for one in said if one.id == job.id), job)
        return job

    def _glimpse(self, launches: Sequence[LaunchPlan]) -> list[SlurmJob | None]:
        """Jobs are queried by id if it is known, because the name of the user's own script or of an
        array task does not identify them."""
        ids = [recorded(launch) for launch in launches]
        known = sorted({job_id for job_id in ids if job_id is not None})
        unknown = [launch for launch, job_id in zip(launches, ids, strict=True) if job_id is None]
        jobs = self._by_id(known) if known else ()
        if unknown:
            jobs += self._queue(unknown, "--states=all", tries=1, answer_s=GLANCE_S)
        return [_of(launch, jobs) for launch in launches]

    def _by_id(self, ids: Sequence[str]) -> tuple[SlurmJob, ...]:
        which = ["--states=all", "-j", ",".join(ids)]
        argv = ["squeue", "-h", "-a", *which, "-o", observe.SQUEUE_FORMAT]
        done = self.slurm.ask(argv, tries=1, answer_s=GLANCE_S)
        if done.code != 0 and not UNKNOWN_JOB.search(done.err):
            raise refusal(argv, done)
        return observe.parse_queue(done.out)

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


def own_id(environ: Mapping[str, str]) -> str | None:
    """The id of the Slurm job of this process; `12_3` for an array task. For scontrol and scancel,
    the plain id of one task can mean the whole array."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def _may_be_queued(launch: LaunchPlan) -> bool:
    """Whether sbatch may have been called: the script is written first, and a script that a person
    gave to sbatch records its job when it starts."""
    return recorded(launch) is not None or render.script_path(launch).exists()


def _of(launch: LaunchPlan, jobs: Sequence[SlurmJob]) -> SlurmJob | None:
    """The recorded job among `jobs`, else the newest job of this launch."""
    ours = [job for job in jobs if _is_of(job, launch)]
    noted = recorded(launch)
    return next((job for job in ours if job.id == noted), ours[-1] if ours else None)


def _is_of(job: SlurmJob, launch: LaunchPlan) -> bool:
    return is_marked(job, launch) or job.command == str(render.script_path(launch))


def is_marked(job: SlurmJob, launch: LaunchPlan) -> bool:
    """Whether the comment of the job names this launch."""
    mark = render.mark(launch)
    return job.comment == mark or job.comment.startswith(f"{mark};")


def _sighting(launch: LaunchPlan, job: SlurmJob | None) -> LaunchStatus:
    if job is not None and not job.is_over:
        return LaunchStatus(
            pending_hints.standing_words(job),
            held=True,
            excluded=_excluded(launch, job),
            needs=pending_hints.needed(job),
            resume=RESUME.get(job.state, "").format(id=job.id),
            at=None if job.meaning == "running" and job.state not in RESUME else job.since,
        )
    name = name_of(launch) if job is None else f"Slurm job {job.id}"
    if name is None:
        return LaunchStatus(None, held=False)
    end = _noted_end(launch) if job is None else _end_of(job)
    if job is not None:
        _note_end(launch, job)
    words = f"{name} has ended" + (f": {end}" if end else "") + _never_wrote(launch, end)
    return LaunchStatus(words, held=False, over="CANCELLED" if end == "CANCELLED" else None)


def _end_of(job: SlurmJob) -> str:
    """The state, of a failed job with Slurm's reason: `FAILED (JobLaunchFailure)`."""
    failed = observe.OUTCOMES.get(job.state) == "failed" and job.reason
    return f"{job.state} ({job.reason})" if failed else job.state


def _never_wrote(launch: LaunchPlan, end: str) -> str:
    """What is likely if Slurm could not start the batch script, and the script wrote nothing."""
    if LAUNCH_FAILURE not in end or any(render.folder(launch).glob("*_batch.out")):
        return ""
    return (
        f": its batch script wrote nothing, so the first node probably cannot write to"
        f" {launch.run_dir}; use a run root on a file system that all nodes share"
    )


def _noted_end(launch: LaunchPlan) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(read_json(read_regular(_record_path(launch)))["ended"])
    return ""


def _note_end(launch: LaunchPlan, job: SlurmJob) -> None:
    """Record how the job ended, because Slurm forgets it after a few minutes."""
    # The run directory may belong to another user, or may not be recorded as the one of this job.
    with contextlib.suppress(OSError, ValueError, KeyError):
        said = read_json(read_regular(_record_path(launch)))
        if said["job_id"] == job.id and said.get("ended") != _end_of(job):
            write_whole(_record_path(launch), json.dumps({**said, "ended": _end_of(job)}).encode())


def _excluded(launch: LaunchPlan, job: SlurmJob) -> dict[str, str]:
    """Excluded hosts of a waiting job. Slurm changes the list only for a waiting job."""
    if job.meaning not in ("queued", "held"):
        return {}
    by_spec = expand(launch.slurm_spec.exclude or "")
    return {
        name: f"scontrol update JobId={job.id} ExcNodeList={fold({*job.excluded} - {name})}"
        for name in sorted({*job.excluded} - {*by_spec})
    }


def name_of(launch: LaunchPlan) -> str | None:
    job_id = recorded(launch)
    return job_id and f"Slurm job {job_id}"


def recorded(launch: LaunchPlan) -> str | None:
    with contextlib.suppress(OSError, ValueError, KeyError):
        return str(read_json(read_regular(_record_path(launch)))["job_id"])
    return None


def record(launch: LaunchPlan, job_id: str, step: str = "") -> None:
    """Record the job id and, for `ndctl agent`, the step by which its tasks find each other."""
    _record_path(launch).parent.mkdir(exist_ok=True)
    write_whole(_record_path(launch), _record(job_id, step))


def recorded_step(launch: LaunchPlan) -> tuple[str, str] | None:
    """Job id and step; None if no step is recorded."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        said = read_json(read_regular(_record_path(launch)))
        return str(said["job_id"]), str(said["step"])
    return None


def claim(launch: LaunchPlan, job_id: str) -> str:
    """Record `job_id` unless another one is recorded, and return the recorded one. Of two callers
    at the same time only one succeeds."""
    if (noted := recorded(launch)) is not None:
        return noted
    path = _record_path(launch)
    path.parent.mkdir(exist_ok=True)
    with written_beside(path, _record(job_id)) as fresh:
        try:
            path.hardlink_to(fresh)
        except FileExistsError:
            pass
        except PermissionError:  # a file system without hard links: the last caller wins
            fresh.replace(path)
    return recorded(launch) or job_id


def _record(job_id: str, step: str = "") -> bytes:
    return json.dumps({"job_id": job_id} | ({"step": step} if step else {})).encode()


def _record_path(launch: LaunchPlan) -> Path:
    return Path(launch.run_dir) / "slurm" / f"launch-{launch.launch}.json"
