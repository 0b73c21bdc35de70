"""Sweeps, and patterns for job names, on the command line."""

import json
from pathlib import Path

import pytest

from orchestrator.contract.files import exit_codes
from tests.cli.test_verbs import ndctl, ndctl_json, run_root
from tests.jobs_on_disk import SPEC, NoCluster, cluster

__all__ = ["cluster", "run_root"]
NAMES = ["e2e-seed-1", "e2e-seed-2", "e2e-seed-3"]


@pytest.fixture
def swept(cluster: NoCluster, run_root: Path) -> NoCluster:
    """Three jobs of a sweep and an unrelated job."""
    assert ndctl("submit", str(SPEC), "--set", "name=other").exit_code == 0
    done = ndctl("submit", str(SPEC), "--sweep", "train.seed=1,2,3")
    assert done.exit_code == 0, done.output
    assert f"submitted e2e-seed-2 (train.seed=2): {run_root / 'e2e-seed-2'}" in done.output
    assert "`ndctl list e2e`, cancel them with `ndctl cancel e2e`" in done.output
    return cluster


def test_list_shows_matching_jobs(swept: NoCluster) -> None:
    rows = ndctl_json("list", "e2e-seed-*")["jobs"]
    assert sorted(row["name"] for row in rows) == NAMES
    assert "other" not in ndctl("list", "e2e-*").output
    assert "other" in ndctl("list", "e2e-seed-1", "oth*").output


def test_status_shows_each_matching_job_and_json_is_a_list(swept: NoCluster) -> None:
    told = ndctl("status", "e2e-seed-[12]").output
    assert "e2e-seed-1: SUBMITTED" in told
    assert "e2e-seed-2: SUBMITTED" in told
    assert "e2e-seed-3: SUBMITTED" not in told
    bodies = ndctl_json("status", "e2e-seed-*")["jobs"]
    assert [body["name"] for body in bodies] == NAMES
    assert ndctl_json("status", "other")["name"] == "other"


def test_cancel_ends_matching_jobs_and_names_them(swept: NoCluster) -> None:
    assert ndctl("cancel", "e2e-seed-2").exit_code == 0
    done = ndctl("cancel", "e2e-seed-*")
    assert done.exit_code == 0, done.output
    assert "cancelled: 2 jobs: e2e-seed-1, e2e-seed-3" in done.output
    assert "already ended: 1 job: e2e-seed-2 (CANCELLED)" in done.output
    assert ndctl_json("status", "other")["state"] == "SUBMITTED"
    again = ndctl("cancel", "e2e-seed-*")
    assert (again.exit_code, "cancelled: no job" in again.output) == (0, True)


def test_several_names_can_be_given(swept: NoCluster) -> None:
    done = ndctl("cancel", "e2e-seed-1", "other", "--no-wait")
    assert done.exit_code == 0, done.output
    assert "cancelling: 2 jobs: e2e-seed-1, other" in done.output


def test_a_job_that_cannot_be_cancelled_is_reported_and_others_are_cancelled(
    swept: NoCluster, run_root: Path
) -> None:
    (run_root / "e2e-seed-2" / "journal.jsonl").write_text("{}\n{}\n")
    done = ndctl("cancel", "e2e-seed-*")
    assert done.exit_code == exit_codes.BAD_JOB_STATE, done.output
    assert "cancelled: 2 jobs: e2e-seed-1, e2e-seed-3" in done.output
    assert "error: not cancelled: 1 job: e2e-seed-2" in done.output


@pytest.mark.parametrize("verb", ["list", "status", "cancel"])
def test_a_pattern_without_matches_lists_the_existing_jobs(
    swept: NoCluster, run_root: Path, verb: str
) -> None:
    done = ndctl(verb, "sweep-*")
    assert done.exit_code == exit_codes.BAD_JOB_STATE
    assert f"no job matches 'sweep-*' in {run_root}; jobs: " in done.output
    assert "jobs: e2e-seed-1, e2e-seed-2, e2e-seed-3, other" in done.output


def test_a_dry_run_of_a_sweep_shows_each_job_and_submits_none(
    cluster: NoCluster, run_root: Path
) -> None:
    done = ndctl("submit", str(SPEC), "--sweep", "parallel.tp=1,2", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "e2e-tp-1: parallel.tp=1; 4 ranks, " in done.output
    assert "e2e-tp-2: parallel.tp=2; 4 ranks, dp_shard=2 x tp=2\n  it would start" in done.output
    assert cluster.submitted == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--at-once=2"], "--at-once needs --sweep"),
        (["--sweep=a.b=1", "--follow"], "--sweep cannot be combined with --follow or --drill"),
        (["--sweep=steps"], "must be KEY=VALUE,VALUE, got steps"),
        (["--sweep=train.seed=1,2", "--at-once=0"], "0 is not in the range x>=1"),
    ],
)
def test_options_that_exclude_each_other_are_a_usage_error(
    cluster: NoCluster, words: list[str], told: str
) -> None:
    done = ndctl("submit", str(SPEC), *words)
    assert (done.exit_code, told in done.output) == (exit_codes.USAGE, True), done.output


def test_all_errors_are_reported_with_the_code_of_the_first(cluster: NoCluster) -> None:
    done = ndctl("submit", str(SPEC), "--sweep", "train.steps=0,5", "--sweep", "train.seed=1,x")
    assert done.exit_code == exit_codes.BAD_SPEC
    assert "3 of 4 combinations have errors; nothing was submitted" in done.output
    assert json.dumps(cluster.submitted) == "[]"


def test_a_group_is_named_like_a_job(swept: NoCluster) -> None:
    rows = ndctl_json("list", "e2e")["jobs"]
    assert sorted(row["name"] for row in rows) == NAMES
    assert {row["group"] for row in rows} == {"e2e"}
    assert "GROUP" in ndctl("list").output
    assert {row["group"] for row in ndctl_json("list", "other")["jobs"]} == {None}
    assert [body["name"] for body in ndctl_json("status", "e2e")["jobs"]] == NAMES
    assert ndctl("cancel", "e2e-seed-1").exit_code == 0
    done = ndctl("cancel", "e2e")
    assert done.exit_code == 0, done.output
    assert "cancelled: 2 jobs: e2e-seed-2, e2e-seed-3" in done.output
    assert ndctl_json("status", "other")["state"] == "SUBMITTED"


def test_a_job_can_join_a_group(swept: NoCluster) -> None:
    done = ndctl("submit", str(SPEC), "--set", "name=late", "--group", "e2e")
    assert done.exit_code == 0, done.output
    assert "late" in {row["name"] for row in ndctl_json("list", "e2e")["jobs"]}
    assert ndctl("submit", str(SPEC), "--set", "name=later", "--group", "a b").exit_code == 2


def test_a_job_comes_before_a_group_of_its_name(swept: NoCluster) -> None:
    assert ndctl("submit", str(SPEC), "--set", "name=e2e").exit_code == 0
    assert ndctl_json("status", "e2e")["name"] == "e2e"


def test_a_job_that_has_not_begun_needs_no_dumps(swept: NoCluster) -> None:
    told = ndctl("diagnose", "other").output
    assert "other is SUBMITTED: no rank trains yet, and no hang was detected" in told
    assert "TORCH_FR_BUFFER_SIZE" not in told
