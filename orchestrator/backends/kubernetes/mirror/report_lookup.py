"""Finds reports of a job in places that outlive its pods or do not need the right `pods/exec`."""

import contextlib
from collections.abc import Sequence

from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.mirror.remote import Remote
from orchestrator.backends.kubernetes.observe.reports import (
    Printed,
    from_data,
    from_events,
    printed,
    report_from,
)
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS, EVENTS, Object, lookup, name_of
from orchestrator.errors import BackendError
from orchestrator.job.reports.job_report import JobReport
from orchestrator.job.state import Run

MOST_PRINTED = 400
"""Last lines of a pod's log that are searched for the progress of training."""


def newest_report(api: Api, remote: Remote, run: Run, pods: Sequence[Object]) -> JobReport | None:
    """The newest report about the launch of `remote`; None if there is none. The logs of `pods` are
    searched in this order."""
    found = [_in_config_map(api, remote), _in_events(api, remote), _in_logs(api, remote, run, pods)]
    reports = [one for one in found if one is not None and one.launch == remote.launch]
    if not reports:
        return None
    newest = max(reports, key=lambda one: one.updated)
    culprits = (one.culprit for one in reports if one.attempt == newest.attempt and one.culprit)
    return replace(
        newest,
        checkpoint=max(one.checkpoint for one in reports),
        culprit=newest.culprit or next(culprits, ""),
    )


def _in_config_map(api: Api, remote: Remote) -> JobReport | None:
    """The report in ConfigMap JOB-state, which is deleted with the job."""
    with contextlib.suppress(BackendError):
        found = api.get(CONFIG_MAPS, remote.namespace, names.state_map_of(remote.job))
        return from_data(lookup(found, ("data",), {}))
    return None


def _in_events(api: Api, remote: Remote) -> JobReport | None:
    """The report in an event; Kubernetes keeps events for an hour."""
    with contextlib.suppress(BackendError):
        selector = f"involvedObject.name={remote.job}"
        events = api.list(EVENTS, remote.namespace, fields=selector).items
        return from_events(events, remote.job)
    return None


def _in_logs(api: Api, remote: Remote, run: Run, pods: Sequence[Object]) -> JobReport | None:
    """Progress that rank 0 printed. It may run in any pod, but mostly in the leader's."""
    found = Printed()
    for pod in pods:
        with contextlib.suppress(BackendError):
            name = name_of(pod)
            lines = api.log(remote.namespace, name, remote.container, since="", tail=MOST_PRINTED)
            found = printed(lines, found)
    return report_from(run, found)
