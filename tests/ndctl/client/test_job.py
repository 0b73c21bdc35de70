"""Jobs that run on the real local backend, from the first call to the last status."""

import asyncio
import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import ndctl
from tests.e2e.job import assert_nothing_left
from tests.ndctl.client.programs import work, write_work

pytestmark = pytest.mark.process
LONG = 600
"""Tenths of a second that a test does not wait for."""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The run root of the test, which ends its jobs."""
    path = tmp_path / "runs"
    monkeypatch.setenv("NDCTL_RUN_ROOT", str(path))
    yield path
    for job in ndctl.jobs():
        if not job.status().ended:
            job.cancel()
        assert_nothing_left(job.run_dir)


def children() -> dict[int, str]:
    """The child processes of the test, zombies included: process id to state and name."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name, _, rest = path.read_text().rpartition(") ")
            state, parent = rest.split()[:2]
            if int(parent) == os.getpid():
                found[int(path.parent.name)] = f"{state} {name}"
    return found


def test_a_program_runs_from_submission_to_success(root: Path, tmp_path: Path) -> None:
    job = ndctl.run(work(tmp_path, 1), name="first", hosts=2, gpus_per_host=2)
    assert job.run_dir == root / "first"
    assert job.status().state in ("SUBMITTED", "PENDING", "STARTING", "RUNNING")

    status = job.wait(check=True)
    assert (status.state, status.attempt, status.restarts) == ("SUCCEEDED", 1, 0)
    assert status.ended
    assert status.hosts == ("host-0", "host-1")
    assert status.world_size == 4
    assert status.backend == "local"
    assert status == ndctl.job("first").wait(timeout=0)
    assert ndctl.job(job.run_dir).run_dir == job.run_dir
    assert [one.name for one in ndctl.jobs()] == ["first"]

    second = ndctl.run(work(tmp_path, 0), name="second", gpus_per_host=1)
    with pytest.raises(ndctl.JobError, match="has already ended"):
        job.cancel()
    with pytest.raises(ndctl.JobError, match="first") as refused:
        ndctl.run(work(tmp_path, 1), name="first", gpus_per_host=1)
    assert "resume=True" in refused.value.fix
    second.wait(check=True)
    assert [one.name for one in ndctl.jobs("s*")] == ["second"]


def test_a_spec_is_a_file_or_a_mapping(root: Path, tmp_path: Path) -> None:
    spec = {
        "name": "mapped",
        "run": {
            "program": Path(write_work(tmp_path)),
            "args": ["1", "hello"],
            "env": {"WORD": "7"},
        },
        "cluster": {"hosts": 1, "gpus_per_host": 1},
    }
    job = ndctl.submit(spec, set={"cluster.gpus_per_host": 2, "resilience.max_restarts": 0})
    status = job.wait(check=True)
    assert (status.name, status.world_size, status.max_restarts) == ("mapped", 2, 0)

    path = tmp_path / "spec.yaml"
    path.write_text((job.run_dir / "spec.yaml").read_text())
    with pytest.raises(ndctl.JobError):
        ndctl.submit(path)
    again = ndctl.submit(path, new=True, set={"run.args": ["0", "again"]})
    assert again.wait(check=True).reason == "all ranks finished in attempt 1"


def test_a_timeout_leaves_the_job_running_and_another_thread_cancels_it(
    root: Path, tmp_path: Path
) -> None:
    job = ndctl.run(work(tmp_path, LONG), name="long", gpus_per_host=2)
    begun = time.monotonic()
    with pytest.raises(ndctl.WaitTimeout, match=r"has not ended after 0\.3 s") as late:
        job.wait(timeout=0.3)
    with pytest.raises(TypeError, match="timeout is '1'; give seconds"):
        job.wait(timeout="1")  # type: ignore[arg-type]
    assert time.monotonic() - begun < 10
    assert isinstance(late.value, TimeoutError)
    assert isinstance(late.value, ndctl.Error)
    assert "Job.cancel()" in late.value.fix
    assert not job.status().ended

    with ThreadPoolExecutor(2) as threads:
        waits = [threads.submit(job.wait), threads.submit(job.wait, check=True)]
        assert job.cancel().state == "CANCELLED"
        assert waits[0].result(timeout=60).state == "CANCELLED"
        with pytest.raises(ndctl.JobError, match="long: CANCELLED"):
            waits[1].result(timeout=60)


def test_a_failed_job_is_an_error_only_if_it_is_checked(root: Path, tmp_path: Path) -> None:
    once = {"resilience.max_restarts": 0}
    job = ndctl.run(work(tmp_path, 0, "bye", 7), name="fails", gpus_per_host=1, set=once)
    status = job.wait()
    assert status.state == "FAILED"
    (incident,) = status.incidents
    assert "exited with code 7" in incident.cause
    assert (incident.culprit.host, incident.culprit.rank) == ("host-0", 0)
    with pytest.raises(ndctl.JobError, match="fails: FAILED"):
        job.wait(check=True)


def test_calls_work_inside_a_running_event_loop(root: Path, tmp_path: Path) -> None:
    async def cell() -> ndctl.Status:
        job = ndctl.run(work(tmp_path, LONG), name="cell", gpus_per_host=1)
        assert not job.status().ended
        assert "cell" in repr(job)
        return job.cancel()

    assert asyncio.run(cell()).state == "CANCELLED"


def test_a_long_living_program_keeps_no_zombies_and_jobs_are_not_its_threads(
    root: Path, tmp_path: Path
) -> None:
    threads, before = threading.active_count(), children()
    job = ndctl.run(work(tmp_path, 1), name="reaped", hosts=2, gpus_per_host=1)
    job.wait(check=True)
    deadline = time.monotonic() + 30
    while children().keys() - before.keys() and time.monotonic() < deadline:
        time.sleep(0.1)
    left = {pid: one for pid, one in children().items() if pid not in before}
    assert left == {}
    assert threading.active_count() <= threads, "fewer, if one of an earlier test has ended"


def test_a_job_that_is_missing_names_the_jobs_that_exist(root: Path) -> None:
    with pytest.raises(ndctl.JobError, match=r"no job 'nothing'.*existing jobs: none") as missing:
        ndctl.job("nothing")
    assert "run_root=FOLDER" in missing.value.fix
    assert "namespace=NAMESPACE" in missing.value.fix
    shown = "".join(traceback.format_exception(missing.value))
    assert "\nndctl.JobError: no job 'nothing'" in shown
    assert shown.count("Traceback") == 1
    assert "job_paths.py" not in shown
    assert ndctl.jobs() == []
    gone = ndctl.Job(root / "gone")
    for call in (gone.status, gone.wait, gone.cancel):
        with pytest.raises(ndctl.JobError, match="no job 'gone'"):
            call()
    assert "no job &#x27;gone&#x27;" in gone._repr_html_()


def test_a_name_in_place_of_a_run_directory_is_refused_with_the_call_that_takes_it() -> None:
    with pytest.raises(TypeError, match=r"ndctl\.job\('first'\) finds a job by its name"):
        ndctl.Job("first")  # type: ignore[arg-type]
