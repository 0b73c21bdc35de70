"""Sweeps, which submit several jobs with one spec: names, problems and submissions."""

import json
from pathlib import Path
from shlex import split
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.app.submission import sweep_jobs
from orchestrator.app.submission.combinations import combinations, values_of
from orchestrator.app.submission.sweep_jobs import (
    Element,
    Sweep,
    elements_of,
    names_of,
    submit_all,
)
from orchestrator.contract.spec.job_spec import KUBERNETES_NAME, NAME
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, JobError, NdctlError, PlanError, SpecError
from tests.agent.world import TurnedClock
from tests.jobs_on_disk import SPEC, NoCluster, cluster

__all__ = ["cluster"]
LR = "train.optimizer.lr=1e-4,3e-4"


def a_sweep(root: Path, *keys: str, **more: Any) -> Sweep:
    return Sweep(spec=SPEC, overrides=(), keys=keys, run_root=str(root), **more)


def planned(sweep: Sweep) -> list[Element]:
    return elements_of(sweep, {}, TurnedClock())


def submitted(sweep: Sweep) -> list[str]:
    clock = TurnedClock()
    return [one.name for one, _ in submit_all(sweep, elements_of(sweep, {}, clock), {}, clock)]


def test_every_combination_is_a_job_named_after_its_values(
    tmp_path: Path, cluster: NoCluster
) -> None:
    names = submitted(a_sweep(tmp_path, LR, "train.seed=1,2"))
    assert names == [
        "e2e-lr-1e-4-seed-1",
        "e2e-lr-1e-4-seed-2",
        "e2e-lr-3e-4-seed-1",
        "e2e-lr-3e-4-seed-2",
    ]
    assert [launch.job for launch in cluster.submitted] == names
    trained = json.loads((tmp_path / names[3] / "trainer-1.json").read_text())["train"]
    assert (trained["optimizer"]["lr"], trained["seed"]) == (3e-4, 2)
    typed = json.loads((tmp_path / names[3] / "submitted.json").read_text())["overrides"]
    assert typed == ["train.optimizer.lr=3e-4", "train.seed=2", f"name='{names[3]}'"]


def test_values_may_change_how_many_hosts_a_job_has(tmp_path: Path, cluster: NoCluster) -> None:
    submitted(a_sweep(tmp_path, "cluster.hosts=1,2"))
    assert [len(launch.hosts) for launch in cluster.submitted] == [1, 2]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("1,2", ["1", "2"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]),
        ("a,,b", ["a", "", "b"]),
    ],
)
def test_a_comma_inside_brackets_or_quotes_does_not_separate_values(
    text: str, values: list[str]
) -> None:
    assert values_of(text) == values


@given(st.lists(st.text(st.characters(exclude_characters=",[]{}'\""), min_size=1), min_size=1))
def test_values_are_read_as_they_were_given(values: list[str]) -> None:
    assert values_of(",".join(values)) == values


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["a.b=0.1,0.2"], ["job-b-0.1", "job-b-0.2"]),
        (["data.files=/x/*.txt,/y"], ["job-files-x-.txt", "job-files-y"]),
        (["name=left,Right", "train.seed=1"], ["left-seed-1", "Right-seed-1"]),
        (["a.b=[1],{2}"], ["job-b-1", "job-b-2"]),
        (["a.b=x y,x/y"], ["job-1", "job-2"]),  # equal after they are written in a name
        (["a.b=A,a"], ["job-1", "job-2"]),
        ([f"a.b={'x' * 70},{'y' * 70}"], ["job-1", "job-2"]),
        ([f"a.b={','.join(map(str, range(11)))}"], [f"job-b-{n}" for n in range(11)]),
    ],
)
def test_a_sweep_name_contains_the_values_if_possible(keys: list[str], names: list[str]) -> None:
    assert names_of("job", combinations(keys), kubernetes=False) == names


def test_on_kubernetes_job_names_are_valid_host_names() -> None:
    found = combinations(["a.lr=1e-4,0.1", "x.kind=Big_One"])
    assert names_of("job", found, kubernetes=True) == [
        "job-lr-1e-4-kind-big-one",
        "job-lr-0-1-kind-big-one",
    ]


@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=12), st.booleans())
def test_names_are_valid_and_unique(values: list[str], kubernetes: bool) -> None:
    found = [(f"train.x={value}",) for value in values]
    names = names_of("job", found, kubernetes=kubernetes)
    limit = KUBERNETES_NAME if kubernetes else NAME
    assert all(map(limit.admits, names))
    assert len({name.casefold() for name in names}) == len(values)


def test_all_problems_of_a_sweep_are_reported_before_submission(
    tmp_path: Path, cluster: NoCluster
) -> None:
    with pytest.raises(PlanError) as refused:
        planned(a_sweep(tmp_path, "train.steps=10,0,-1", "parallel.tp=2,3"))
    told = refused.value.message
    assert told.startswith("5 of 6 combinations have errors; nothing was submitted:")
    assert "train.steps=0 parallel.tp=2, train.steps=0 parallel.tp=3: --sweep train.steps" in told
    assert "train.steps=10 parallel.tp=3: " in told
    assert "train.steps=10 parallel.tp=2" not in told
    assert cluster.submitted == []
    assert list(tmp_path.iterdir()) == []


def test_a_problem_that_all_jobs_share_is_reported_once(tmp_path: Path, cluster: NoCluster) -> None:
    cluster.obstacle = "the queue is closed"
    with pytest.raises(BackendError, match="2 of 2 combinations") as refused:
        planned(a_sweep(tmp_path, LR))
    assert refused.value.message.count("all combinations: the queue is closed") == 1


def test_a_name_that_exists_is_reported_before_submission(
    tmp_path: Path, cluster: NoCluster
) -> None:
    submitted(a_sweep(tmp_path, "train.seed=2"))
    with pytest.raises(JobError, match="1 of 2 combinations") as refused:
        planned(a_sweep(tmp_path, "train.seed=1,2"))
    assert "train.seed=2: job e2e-seed-2 already exists in" in refused.value.message
    assert len(cluster.submitted) == 1
    assert submitted(a_sweep(tmp_path, "train.seed=2", resume=True)) == ["e2e-seed-2"]


def test_too_many_combinations_are_refused_before_planning(tmp_path: Path) -> None:
    many = ",".join(map(str, range(1001)))
    with pytest.raises(SpecError, match="1,001 combinations; at most 1,000"):
        planned(a_sweep(tmp_path, f"train.seed={many}"))


def test_a_refused_job_of_a_sweep_reports_the_submitted_ones(
    tmp_path: Path, cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(handover: Handover) -> None:
        if handover.launch.job == "e2e-seed-2":
            raise BackendError("the queue is full", fix="wait")
        cluster.submitted.append(handover.launch)

    monkeypatch.setattr(cluster, "submit", submit)
    with pytest.raises(NdctlError) as failed:
        submitted(a_sweep(tmp_path, "train.seed=1,2,3"))
    assert "e2e-seed-2: the queue is full" in failed.value.message
    assert "already submitted: e2e-seed-1; not submitted: e2e-seed-3" in failed.value.message
    first, *again, back = failed.value.fix.splitlines()
    assert (first, again[0].strip()) == ("wait", "to go on, submit the others:")
    typed = [split(line) for line in again[1:]]
    assert typed == [
        [
            "ndctl",
            "submit",
            str(SPEC),
            "--set",
            f"train.seed={seed}",
            "--set",
            f"name='e2e-seed-{seed}'",
            "--group",
            "e2e",
            "--run-root",
            str(tmp_path),
        ]
        for seed in (2, 3)
    ]
    assert "`ndctl cancel e2e` cancels the submitted jobs" in back


def test_the_jobs_of_a_sweep_are_a_group_that_a_job_of_its_name_does_not_hide(
    tmp_path: Path, cluster: NoCluster
) -> None:
    groups = {element.submission.group for element in planned(a_sweep(tmp_path, LR))}
    assert groups == {"e2e"}
    (tmp_path / "e2e").mkdir()
    groups = {element.submission.group for element in planned(a_sweep(tmp_path, LR))}
    assert groups == {"e2e-sweep"}
    named = planned(a_sweep(tmp_path, LR, group="lr-search"))
    assert {element.submission.group for element in named} == {"lr-search"}


def test_the_option_now_is_only_for_slurm(tmp_path: Path, cluster: NoCluster) -> None:
    with pytest.raises(SpecError, match="--at-once needs --backend slurm"):
        planned(a_sweep(tmp_path, LR, at_once=2))


def test_a_job_waits_for_an_earlier_one_of_the_sweep(
    tmp_path: Path, cluster: NoCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(1, 9))
    monkeypatch.setattr(sweep_jobs, "_slurm_id", lambda submission: f"{next(numbers)}")
    sweep = a_sweep(tmp_path, "train.seed=1,2,3,4,5", at_once=2)
    clock = TurnedClock()
    own = ("--nice=5", "--dependency=after:99")
    elements = [
        _on_slurm(one, own if number == 2 else ())
        for number, one in enumerate(elements_of(replace(sweep, at_once=None), {}, clock))
    ]
    for _ in submit_all(sweep, elements, {}, clock):
        pass
    assert [launch.slurm and launch.slurm.sbatch_args for launch in cluster.submitted] == [
        (),
        (),
        ("--nice=5", "--dependency=after:99,afterany:1"),
        ("--dependency=afterany:2",),
        ("--dependency=afterany:3",),
    ]


def _on_slurm(element: Element, args: tuple[str, ...]) -> Element:
    submission = element.submission
    spec = submission.planned.spec
    slurm = replace(spec.cluster.slurm, sbatch_args=args)
    spec = replace(spec, cluster=replace(spec.cluster, backend="slurm", slurm=slurm))
    planned = replace(submission.planned, spec=spec)
    return replace(element, submission=replace(submission, planned=planned))


def test_a_value_that_is_given_twice_is_refused(tmp_path: Path, cluster: NoCluster) -> None:
    with pytest.raises(SpecError, match=r"the sweep has train\.seed=1 more than once"):
        elements_of(a_sweep(tmp_path, "train.seed=1,2,1"), {}, TurnedClock())
