"""How jobs stand: asked of the API server as seldom as can be."""

from collections.abc import Sequence

from orchestrator.backends.kubernetes import fields, observe
from orchestrator.backends.kubernetes.api import Api
from orchestrator.backends.kubernetes.fields import LABEL
from orchestrator.backends.kubernetes.observe import Observed
from orchestrator.backends.kubernetes.resources import EVENTS, PODS, JobKind, Object, name_of
from orchestrator.contract.launch import LaunchPlan


def look(api: Api, namespace: str, kind: JobKind, launches: Sequence[LaunchPlan]) -> list[Observed]:
    """At launches of one place and kind: objects, pods and events are listed once for all."""
    jobs: dict[str, Object]
    if len(launches) == 1:
        job = api.get(kind.resource, namespace, launches[0].job)
        jobs = {} if job is None else {name_of(job): job}
    else:
        listed = api.list(kind.resource, namespace, labels=LABEL)
        jobs = {name_of(job): job for job in listed.items}
    label = f"{LABEL}={launches[0].job}" if len(launches) == 1 else LABEL
    pods = api.list(PODS, namespace, labels=label).items
    # Only who waits has something to explain.
    calm = jobs and all(fields.is_running(pod) for pod in pods)
    whole = len(pods) >= sum(len(one.hosts) for one in launches)
    events = () if calm and whole else api.list(EVENTS, namespace, cached=True).items
    return [
        observe.observe(
            kind,
            shown_name(kind, namespace, one.job),
            jobs.get(one.job),
            pods,
            events,
            hosts=len(one.hosts),
        )
        for one in launches
    ]


def shown_name(kind: JobKind, namespace: str, job: str) -> str:
    return f"{kind.resource.kind} {namespace}/{job}" if namespace else f"{kind.resource.kind} {job}"
