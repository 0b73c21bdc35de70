"""Commands that are printed about a job find that job."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.app.commands import commands_for, commands_of
from orchestrator.app.planning import plans
from orchestrator.app.remote import Found
from orchestrator.app.submission import payload, submit_job
from orchestrator.backends.kubernetes.mirror.mirror_paths import folder_of
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.load import read_spec
from tests.agent.world import TurnedClock
from tests.app.test_remote import FakeMirror, submitted, write
from tests.jobs_on_disk import SPEC, NoCluster, cluster, submission

__all__ = ["cluster"]


def root_in(command: str) -> str | None:
    words = shlex.split(command)
    return words[words.index("--run-root") + 1] if "--run-root" in words else None


def test_a_command_names_the_run_root_only_if_necessary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "my runs"
    run_dir = RunDir(root / "job")
    elsewhere = commands_of(run_dir, {})
    for command in (elsewhere.of("logs", "--rank", 1), elsewhere.submit("--set a.b=c")):
        assert root_in(command) == str(root)
    assert elsewhere.submit("--set a.b=c").endswith("--set a.b=c")
    there = commands_of(run_dir, {"NDCTL_RUN_ROOT": str(root)})
    assert there.of("status") == "ndctl status job"
    monkeypatch.chdir(tmp_path)
    by_default = commands_of(RunDir(tmp_path / "ndctl-runs" / "job"), {})
    assert by_default.of("status") == "ndctl status job"
    other = commands_of(RunDir(tmp_path / "ndctl-runs" / "job"), {"NDCTL_RUN_ROOT": "/x"})
    assert root_in(other.of("status")) == str(tmp_path / "ndctl-runs")


def mirrored(root: Path, namespace: str) -> Found:
    folder = folder_of(root, "prod/eu", namespace, "job")
    folder.mkdir(parents=True)
    (folder / "remote.json").write_text(json.dumps({"context": "prod/eu"}))
    return Found(RunDir(folder), FakeMirror(RunDir(folder)))


def test_the_command_for_a_copy_names_the_run_root_of_the_copy(tmp_path: Path) -> None:
    found = mirrored(tmp_path, "a")
    assert commands_for(found, {}).of("status") == f"ndctl status job --run-root {tmp_path}"
    environ = {"NDCTL_RUN_ROOT": str(tmp_path)}
    assert commands_for(found, environ).of("status") == "ndctl status job"


def test_for_two_jobs_with_one_name_the_command_names_the_cluster(tmp_path: Path) -> None:
    found, _ = mirrored(tmp_path, "a"), mirrored(tmp_path, "b")
    environ = {"NDCTL_RUN_ROOT": str(tmp_path)}
    which = "ndctl status job --context prod/eu --namespace a"
    assert commands_for(found, environ).of("status") == which


def test_a_local_job_with_the_same_name_needs_the_cluster_too(tmp_path: Path) -> None:
    found = mirrored(tmp_path, "a")
    write(RunDir(tmp_path / "job"), submitted(RunDir(tmp_path / "job")))
    said = commands_for(found, {"NDCTL_RUN_ROOT": str(tmp_path)}).of("status")
    assert "--namespace a" in said


def test_the_spec_of_a_run_contains_its_run_root(cluster: NoCluster, tmp_path: Path) -> None:
    """So the job can be submitted again from any folder."""
    run_dir = submit_job.submit(submission(tmp_path), {}, TurnedClock()).run_dir
    assert read_spec(run_dir.spec).run_root == str(tmp_path)


def typed(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Parse `command` in another folder as a shell does, without running it."""
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(
        ["/bin/sh", "-c", f"{command} --dry-run"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.process
def test_the_resume_command_names_the_users_file_and_works_in_any_folder(
    cluster: NoCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = tmp_path / "my jobs", tmp_path / "other"
    (mine / "corpus").mkdir(parents=True)
    other.mkdir()
    (mine / "corpus" / "a.txt").write_text("text")
    (mine / "job.yaml").write_text(SPEC.read_text().replace("{stdlib}/*.py", "corpus/*.txt"))
    monkeypatch.chdir(mine)
    planned = plans.plan_spec(Path("job.yaml"), ("train.steps=48",), {})
    sent = payload.Submission(planned=planned, run_root=Path("ndctl-runs"))
    run_dir = submit_job.submit(sent, {}, TurnedClock()).run_dir
    monkeypatch.chdir(other)
    command = commands_of(run_dir, {}).submit()
    assert shlex.split(command)[:5] == ["cd", str(mine), "&&", "ndctl", "submit"]
    done = typed(command, other)
    assert done.returncode == 0, done.stderr
    assert '"steps": 48' in done.stdout
    assert str(run_dir.path) in done.stdout
    # The user's file is gone, so the command names the copy in the run directory.
    (mine / "job.yaml").unlink()
    assert commands_of(run_dir, {}).submit() == (
        f"ndctl submit {shlex.quote(str(run_dir.spec))} --resume"
        f" --run-root {shlex.quote(str(mine / 'ndctl-runs'))}"
    )


def test_a_spec_of_absolute_paths_needs_no_folder(cluster: NoCluster, tmp_path: Path) -> None:
    run_dir = submit_job.submit(submission(tmp_path), {}, TurnedClock()).run_dir
    said = commands_of(run_dir, {"NDCTL_RUN_ROOT": str(tmp_path)}).submit()
    assert said == f"ndctl submit {SPEC} --resume"
