"""Annotations of a job from the report of its leader in ConfigMap JOB-state."""

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.controller.decide import Scope, Seen, decide
from orchestrator.backends.kubernetes.controller.state_notes import STEPS_S, notes_of, state_notes
from orchestrator.backends.kubernetes.observe.reports import to_annotation, to_data
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS, Object
from orchestrator.job.reports.job_report import JobReport

REPORT = JobReport(
    launch=3,
    state="RUNNING",
    message="attempt 2 trains",
    step=823,
    steps=5000,
    attempt=2,
    updated=1795456109.0,
    checkpoint=800,
    culprit="rank 3 on node2",
)
SAID = {
    "ndctl.dev/state": "RUNNING",
    "ndctl.dev/step": "823/5000",
    "ndctl.dev/attempt": "2",
    "ndctl.dev/culprit": "rank 3 on node2",
    "ndctl.dev/message": "attempt 2 trains",
    "ndctl.dev/updated": "2026-11-23T17:48:29Z",
}


def a_job(**notes: str) -> dict[str, Any]:
    mine = {names.LAUNCH_ANNOTATION: "3", names.CONTROLLER_ANNOTATION: "home", **notes}
    metadata = {"name": "job", "namespace": "team", "uid": "u", "resourceVersion": "7"}
    labels = names.labels_of_job("job")
    return {"metadata": {**metadata, "labels": labels, "annotations": mine}}


def a_map(report: JobReport | None = REPORT, namespace: str = "team", **notes: str) -> Object:
    """The ConfigMap as the controller sees it, without its data."""
    said = notes if report is None else to_annotation(report)
    return {
        "metadata": {
            "name": "job-state",
            "namespace": namespace,
            "uid": "m",
            "labels": names.labels_of_job("job"),
            "annotations": said,
        }
    }


def changes(job: Object, *maps: Object) -> list[Any]:
    return [one.change for one in state_notes([("pytorchjob", job)], maps)]


def test_the_leaders_report_is_noted_on_its_job() -> None:
    assert changes(a_job(), a_map()) == [{"metadata": {"annotations": SAID}}]
    assert changes(a_job(**SAID), a_map()) == []


def test_a_note_is_part_of_the_decision_and_no_second_patch_of_a_job() -> None:
    scope = Scope(home="home")
    seen = Seen(jobs={"pytorchjob": [a_job()]}, beside={CONFIG_MAPS: [a_map()]})
    (chain,) = decide(seen, scope, {}, 0.0).chains
    assert [one.does for one in chain] == ["record the state of PyTorchJob team/job"]
    unlooked = a_job()
    del unlooked["metadata"]["annotations"][names.CONTROLLER_ANNOTATION]
    seen = Seen(jobs={"pytorchjob": [unlooked]}, beside={CONFIG_MAPS: [a_map()]})
    (chain,) = decide(seen, scope, {}, 0.0).chains
    assert [one.does for one in chain] == ["manage PyTorchJob team/job"]


@pytest.mark.parametrize(
    "found",
    [
        a_map(replace(REPORT, launch=2)),
        a_map(namespace="other"),
        a_map(None),
        a_map(None, **{names.REPORT_ANNOTATION: "{"}),
        a_map(None, **{names.REPORT_ANNOTATION: '{"state": "OWNED", "launch": "3"}'}),
        a_map(None, **{names.REPORT_ANNOTATION: '{"message": "' + "x" * 100_000 + '"}'}),
    ],
)
def test_reports_of_other_launches_and_other_texts_are_not_noted(found: Object) -> None:
    assert changes(a_job(), found) == []


def test_texts_of_pods_are_shortened_before_they_reach_the_job() -> None:
    """Any process in a pod can write such texts."""
    (change,) = changes(a_job(), a_map(replace(REPORT, message="a\nb " * 200, culprit="")))
    message = change["metadata"]["annotations"]["ndctl.dev/message"]
    assert len(message) <= 512
    assert "\n" not in message


def test_a_change_of_the_step_alone_is_noted_once_a_minute() -> None:
    later = replace(REPORT, step=900, updated=REPORT.updated + STEPS_S - 1)
    assert notes_of(later, SAID) is None
    assert notes_of(replace(later, updated=REPORT.updated + STEPS_S), SAID) is not None
    stands_still = replace(REPORT, updated=REPORT.updated + 9 * STEPS_S)
    assert notes_of(stands_still, SAID) is None, "a report without a change must write nothing"
    changed = notes_of(replace(later, state="RECOVERING"), SAID)
    assert changed is not None
    assert changed["ndctl.dev/step"] == "900/5000"
    assert notes_of(REPORT, {**SAID, "ndctl.dev/updated": "yesterday", "ndctl.dev/step": ""})


def test_every_documented_key_is_in_the_config_map() -> None:
    assert {"state", "step", "steps", "attempt", "updated", "message"} <= set(to_data(REPORT))
