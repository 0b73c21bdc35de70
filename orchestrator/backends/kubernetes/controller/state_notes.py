"""Copies the state of a job from its ConfigMap `JOB-state` to the job object, where `kubectl get`
and `kubectl describe` show it. Pure.

The job's pods write the ConfigMap and may not write the job. Its content is parsed as a report
first, so only known states, numbers and two short texts of the current launch are copied.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from orchestrator.backends.kubernetes.controller.actions import Patch, Ref
from orchestrator.backends.kubernetes.observe import object_fields
from orchestrator.backends.kubernetes.observe.reports import from_annotation, to_data
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import JOB_KINDS, Object, lookup, name_of
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.job.reports.job_report import JobReport

STEPS_S = 60.0
"""Interval of copies if only the step changed, because each write wakes all watchers of the job."""
NOTED = {
    "state": names.STATE_ANNOTATION,
    "attempt": names.ATTEMPT_ANNOTATION,
    "culprit": names.CULPRIT_ANNOTATION,
    "message": names.MESSAGE_ANNOTATION,
}
"""Key of the ConfigMap -> annotation of the job."""


def state_notes(
    jobs: Sequence[tuple[Kind, Object]], config_maps: Iterable[Object]
) -> Iterator[Patch]:
    """One patch for each job whose annotations are older than its report."""
    maps = {_place(one): one for one in config_maps}
    for kind, job in jobs:
        namespace, name = _place(job)
        found = maps.get((namespace, names.state_map_of(name)))
        report = from_annotation(found) if found is not None else None
        # The ConfigMap of an earlier launch may still be there.
        if report is None or report.launch != object_fields.launch_of(job):
            continue
        notes: Mapping[str, str] = lookup(job, ("metadata", "annotations"), {})
        if (change := notes_of(report, notes)) is not None:
            what = Ref.of(JOB_KINDS[kind].resource, job)
            yield Patch(
                what=what,
                change={"metadata": {"annotations": change}},
                does=f"record the state of {what}",
                reason=f"{report.state} at step {report.step}, attempt {report.attempt}",
            )


def notes_of(report: JobReport, notes: Mapping[str, str]) -> dict[str, str] | None:
    """The annotations to write; None if they are already current."""
    data = to_data(report)
    wanted = {annotation: data[key] for key, annotation in NOTED.items()}
    wanted[names.STEP_ANNOTATION] = f"{report.step}/{report.steps or '?'}"
    wanted[names.UPDATED_ANNOTATION] = data["updated"]
    # The time of the report differs each time, so it alone is no reason to write.
    differs = {key for key, said in wanted.items() if notes.get(key, "") != said}
    stepped = names.STEP_ANNOTATION in differs and _age_s(report, notes) >= STEPS_S
    more = differs - {names.STEP_ANNOTATION, names.UPDATED_ANNOTATION}
    return wanted if stepped or more else None


def _age_s(report: JobReport, notes: Mapping[str, str]) -> float:
    try:
        return report.updated - object_fields.seconds_of(notes[names.UPDATED_ANNOTATION])
    # Never noted, or a person changed it: write now.
    except (KeyError, ValueError):
        return STEPS_S


def _place(item: Object) -> tuple[str, str]:
    return str(lookup(item, ("metadata", "namespace"), "")), name_of(item)
