"""What a job told its cluster, of places that outlive its pods, or that need no `pods/exec`."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.observe.reports import (
    Printed,
    from_data,
    from_events,
    printed,
    report_from,
)
from orchestrator.backends.kubernetes.render import names
from orchestrator.backends.kubernetes.resources import (
    CONFIG_MAPS,
    EVENTS,
    Object,
    lookup,
    name_of,
)
from orchestrator.errors import BackendError
from orchestrator.job.reports.job_report import JobReport
from orchestrator.job.state import Run

if TYPE_CHECKING:
    from orchestrator.backends.kubernetes.mirror.mirror import Remote

MOST_PRINTED = 400
"""Lines of a pod's log that are looked at for how far training came."""


def newest_report(api: Api, remote: "Remote", run: Run, pods: Sequence[Object]) -> JobReport | None:
    """Of the launch that `remote` is of; None where nothing can be had. `pods`: whose logs are
    looked at, in this order."""
    found = [_told(api, remote), _shown(api, remote), _printed(api, remote, run, pods)]
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


def _told(api: Api, remote: "Remote") -> JobReport | None:
    """In its ConfigMap, which goes with the job."""
    with contextlib.suppress(BackendError):
        found = api.get(CONFIG_MAPS, remote.namespace, names.state_map_of(remote.job))
        return from_data(lookup(found, ("data",), {}))
    return None


def _shown(api: Api, remote: "Remote") -> JobReport | None:
    """In an event, which stays for an hour."""
    with contextlib.suppress(BackendError):
        selector = f"involvedObject.name={remote.job}"
        events = api.list(EVENTS, remote.namespace, fields=selector).items
        return from_events(events, remote.job)
    return None


def _printed(api: Api, remote: "Remote", run: Run, pods: Sequence[Object]) -> JobReport | None:
    """By its ranks: rank 0 may be in any pod, most of the time in the one that leads."""
    found, container = Printed(), names.CONTAINERS[remote.kind]
    for pod in pods:
        with contextlib.suppress(BackendError):
            name = name_of(pod)
            lines = api.log(remote.namespace, name, container, since="", tail=MOST_PRINTED)
            found = printed(lines, found)
    return report_from(run, found)
