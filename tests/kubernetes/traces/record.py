"""Records what an operator does after each action of a scenario, and writes `*.yaml` traces.

`python -m tests.kubernetes.traces.record KIND OPERATOR [TIMES [SCENARIO...]]` records the operator
of KUBE_OPERATORS for jobs of KIND. OPERATOR is its name and version in words.
"""

import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes import real_operators
from tests.kubernetes.standins.api import Object
from tests.kubernetes.testbed import KubeTestbed, running_testbed
from tests.kubernetes.traces import jobset_scenarios, pytorchjob_scenarios, trainjob_scenarios
from tests.kubernetes.traces.compare import Step, merged
from tests.kubernetes.traces.scenarios import (
    NAMESPACE,
    Action,
    JobUnderTest,
    Scenario,
    pod_name,
    start_job,
)
from tests.kubernetes.traces.watch import Changes, watch_changes
from tests.testbeds import TestbedError

FOLDER = Path(__file__).parent
SCENARIOS = {
    "PyTorchJob": pytorchjob_scenarios.SCENARIOS,
    "JobSet": jobset_scenarios.SCENARIOS,
    "TrainJob": trainjob_scenarios.SCENARIOS,
}
"""Kind of job to its scenarios."""
WATCHED = ("pods", "services", "events")
"""Resources that are watched beside the job."""
QUIET_S = 2.0
"""The watched objects must not change for this long before the result of an operator's action is
recorded."""
QUIET_WITHIN_S = 120.0
UIDS = ("uid", "controller-uid")
"""Ends of the labels and annotations whose value differs from job to job."""
Change = tuple[str, Object]


def record(kube: KubeTestbed, scenario: Scenario, quiet_s: float = QUIET_S) -> list[Step]:
    """Performs the actions of a scenario and returns the result of each.

    An action is over when its result is there, and nothing has changed for `quiet_s` after that.
    """
    tested = JobUnderTest(kube, scenario.kind, {})
    kube.wait_for("the objects of the previous job to be gone", lambda: not _left(tested))
    with watch_changes(kube, (scenario.kind.resource, *WATCHED), NAMESPACE) as changes:
        steps = [
            _step(tested, action, changes, quiet_s)
            for action in (start_job(scenario), *scenario.actions)
        ]
    if scenario is SCENARIOS[scenario.kind.kind][0]:
        # Every scenario creates the same pods and services, so only the first one records them.
        changed = changes.since(0)
        steps[0]["a pod is"] = _shapes(_changes_of(changed, "pods"), _pod)
        steps[0]["a service is"] = _shapes(_changes_of(changed, "services"), _service)
    return steps


def _left(tested: JobUnderTest) -> list[Object]:
    """Objects of the previous job."""
    found = [tested.kube.objects(it, NAMESPACE, label) for it, label in tested.kind.makes]
    own = (tested.kind.resource, "pods")
    return [*chain(*found), *chain(*(tested.kube.objects(it, NAMESPACE) for it in own))]


def _step(tested: JobUnderTest, action: Action, changes: Changes, quiet_s: float) -> Step:
    first, tested.before = len(changes), tested.uids()
    action.perform(tested)
    tested.kube.wait_for(f"the result of: {action.description}", lambda: action.is_settled(tested))
    _until_quiet(changes, quiet_s)
    changed = changes.since(first)
    pods, services = _changes_of(changed, "pods"), _changes_of(changed, "services")
    return {
        "action": action.description,
        "pods made": _created(pods, tested.kind.group_label),
        "pods deleted": _deleted(pods),
        "services made": sorted(chain(*_created(services, "").values())),
        "services deleted": _deleted(services),
        "job": _job_status(tested),
        "conditions passed through": _conditions(_changes_of(changed, tested.kind.resource)),
        "events": _events_about_job(_changes_of(changed, "events"), tested.kind.kind),
    }


def _until_quiet(changes: Changes, quiet_s: float) -> None:
    end, count, since = time.monotonic() + QUIET_WITHIN_S, len(changes), time.monotonic()
    while time.monotonic() < since + quiet_s:
        if time.monotonic() > end:
            raise TestbedError(f"objects keep changing: {changes.since(count - 5)}")
        time.sleep(0.1)
        if len(changes) != count:
            count, since = len(changes), time.monotonic()


def _changes_of(changed: Iterable[tuple[str, str, Object]], resource: str) -> list[Change]:
    return [(change, thing) for one, change, thing in changed if one == resource]


def _created(changes: Iterable[Change], group_label: str) -> dict[str, list[str]]:
    """Names of created objects by kind of replica: the operator has no order between kinds."""
    created: dict[str, list[str]] = {}
    for change, thing in changes:
        if change == "ADDED":
            kind = thing["metadata"].get("labels", {}).get(group_label, "")
            created.setdefault(kind, []).append(pod_name(thing))
    return {kind: sorted(names) for kind, names in created.items()}


def _deleted(changes: Iterable[Change]) -> list[str]:
    """Names of deleted objects. A pod counts as deleted from its deletionTimestamp on."""
    ended = {
        thing["metadata"]["uid"]: pod_name(thing)
        for change, thing in changes
        if change == "DELETED" or "deletionTimestamp" in thing["metadata"]
    }
    return sorted(ended.values())


def _job_status(tested: JobUnderTest) -> Object | None:
    """Status of the job; None if the job is deleted."""
    found = tested.kube.objects(tested.kind.resource, NAMESPACE)
    if not found:
        return None
    status = found[0]["status"]
    conditions = sorted(map(_condition, status.get("conditions", ())))
    return {"conditions": conditions, **tested.kind.status(status)}


def _condition(one: Object) -> str:
    return f"{one['type']} {one['status']} {one['reason']}: {one['message']}"


def _conditions(changes: Iterable[Change]) -> list[str]:
    return sorted(
        {
            _condition(one)
            for _, thing in changes
            for one in (thing.get("status") or {}).get("conditions") or ()
        }
    )


def _events_about_job(changes: Iterable[Change], kind: str) -> list[str]:
    """Events of any controller about the job itself."""
    return sorted(
        {
            f"{event['type']} {event['reason']}: {event['message']}"
            for change, event in changes
            if change != "DELETED" and event["involvedObject"]["kind"] == kind
        }
    )


def _shapes(changes: Iterable[Change], shape: Any) -> dict[str, Object]:
    created = [thing for change, thing in changes if change == "ADDED"]
    return {pod_name(thing): shape(thing) for thing in created}


def _pod(pod: Object) -> Object:
    spec = pod["spec"]
    return {
        **_about(pod),
        "restartPolicy": spec["restartPolicy"],
        "schedulerName": spec["schedulerName"],
        "initContainers": [each["name"] for each in spec.get("initContainers", ())],
        "env": {
            each["name"]: {one["name"]: one.get("value", "") for one in each["env"]}
            for each in spec["containers"]
        },
    }


def _service(service: Object) -> Object:
    spec = service["spec"]
    ports = [{key: port[key] for key in ("name", "port")} for port in spec.get("ports", ())]
    return {
        **_about(service),
        "clusterIP": spec["clusterIP"],
        "selector": dict(sorted(spec["selector"].items())),
        "publishNotReadyAddresses": spec.get("publishNotReadyAddresses", False),
        "ports": ports,
    }


def _about(thing: Object) -> Object:
    metadata = thing["metadata"]
    return {
        "labels": _without_uids(metadata.get("labels", {})),
        "annotations": _without_uids(metadata.get("annotations", {})),
        "owners": [
            {key: value for key, value in owner.items() if key != "uid"}
            for owner in metadata["ownerReferences"]
        ],
    }


def _without_uids(marks: dict[str, str]) -> dict[str, str]:
    return {key: "" if key.endswith(UIDS) else value for key, value in sorted(marks.items())}


def path_of(scenario: Scenario) -> Path:
    return FOLDER / f"{scenario.title}.yaml"


def read(scenario: Scenario) -> list[Step]:
    found: list[Step] = yaml.safe_load(path_of(scenario).read_text())["steps"]
    return found


class _Dumper(yaml.SafeDumper):
    """Writes repeated values in full, without YAML anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main(kind: str, operator: str, times: str = "4", *names: str) -> None:
    if kind not in real_operators.kinds():
        sys.exit(f"KUBE_OPERATORS names no folder with the operator of {kind}")
    FOLDER.mkdir(exist_ok=True)
    with running_testbed() as kube:
        about = {
            "operator": operator,
            "kubernetes": kube.version,
            "on": f"{datetime.now(UTC):%Y-%m-%d}",
            "recordings": int(times),
        }
        for scenario in SCENARIOS[kind]:
            if not names or scenario.name in names:
                steps = merged([_recorded(kube, scenario) for _ in range(int(times))])
                text = yaml.dump(
                    {**about, "steps": steps}, Dumper=_Dumper, sort_keys=False, width=100
                )
                path_of(scenario).write_text(text)
                sys.stdout.write(f"{path_of(scenario)}\n")


def _recorded(kube: KubeTestbed, scenario: Scenario) -> list[Step]:
    kube.restore()
    return record(kube, scenario)


if __name__ == "__main__":
    main(*sys.argv[1:])
