"""What an operator makes of a job, act by act, in a form that can be compared with what the
project's own operator was seen to do (`traces/*.yaml`).

Not all that an operator does is the same twice: Kubeflow's goes through the kinds of replicas in
no order. So a trace is made of several recordings, and says what was in each and what in some.

`python -m tests.kubernetes.traces.record OPERATOR [TIMES [SCENARIO...]]` records the operator that
KUBE_OPERATORS has; OPERATOR says in words which one that is, and its version."""

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
from tests.kubernetes.traces.compare import Step, merged
from tests.kubernetes.traces.scenarios import NAMESPACE, SCENARIOS, Act, Bed, Scenario, start
from tests.kubernetes.traces.watch import Changes, watched
from tests.testbeds import TestbedError

FOLDER = Path(__file__).parent
WATCHED = ("pytorchjobs", "pods", "services", "events")
QUIET_S = 2.0
"""Without any change of these, before what came of an act is taken down."""
QUIET_WITHIN_S = 120.0
REPLICA_TYPE = "training.kubeflow.org/replica-type"
Change = tuple[str, Object]


def record(kube: KubeTestbed, scenario: Scenario) -> list[Step]:
    """Play it, and tell what came of each act."""
    bed = Bed(kube, {})
    kube.wait_for("nothing of another job", lambda: not _left(kube))
    with watched(kube, WATCHED, NAMESPACE) as changes:
        steps = [_step(bed, act, changes) for act in (start(scenario), *scenario.acts)]
    if scenario is SCENARIOS[0]:
        # What is made is the same in all of them.
        changed = changes.since(0)
        steps[0]["a pod is"] = _shapes(_of(changed, "pods"), _pod)
        steps[0]["a service is"] = _shapes(_of(changed, "services"), _service)
    return steps


def _left(kube: KubeTestbed) -> list[Object]:
    services = kube.objects("services", NAMESPACE, REPLICA_TYPE)
    return services + kube.objects("pytorchjobs", NAMESPACE) + kube.objects("pods", NAMESPACE)


def _step(bed: Bed, act: Act, changes: Changes) -> Step:
    first, bed.before = len(changes), bed.uids()
    act.do(bed)
    bed.kube.wait_for(f"what comes of it: {act.does}", lambda: act.settled(bed))
    _until_quiet(changes)
    seen = changes.since(first)
    pods, services = _of(seen, "pods"), _of(seen, "services")
    return {
        "act": act.does,
        "pods made": _made(pods),
        "pods deleted": _deleted(pods),
        "services made": sorted(chain(*_made(services).values())),
        "services deleted": _deleted(services),
        "job": _standing(bed.kube),
        "conditions passed through": _conditions(_of(seen, "pytorchjobs")),
        "events": _told(_of(seen, "events")),
    }


def _until_quiet(changes: Changes) -> None:
    end, count, since = time.monotonic() + QUIET_WITHIN_S, len(changes), time.monotonic()
    while time.monotonic() < since + QUIET_S:
        if time.monotonic() > end:
            raise TestbedError(f"no quiet: {changes.since(count - 5)}")
        time.sleep(0.1)
        if len(changes) != count:
            count, since = len(changes), time.monotonic()


def _of(seen: Iterable[tuple[str, str, Object]], resource: str) -> list[Change]:
    return [(change, thing) for one, change, thing in seen if one == resource]


def _made(changes: Iterable[Change]) -> dict[str, list[str]]:
    """By the kind of replica, for between kinds there is no order."""
    made: dict[str, list[str]] = {}
    for change, thing in changes:
        if change == "ADDED":
            kind = thing["metadata"]["labels"][REPLICA_TYPE]
            made.setdefault(kind, []).append(thing["metadata"]["name"])
    return made


def _deleted(changes: Iterable[Change]) -> list[str]:
    """Each once for each object; a pod is so from its time stamp on."""
    ended = {
        thing["metadata"]["uid"]: thing["metadata"]["name"]
        for change, thing in changes
        if change == "DELETED" or "deletionTimestamp" in thing["metadata"]
    }
    return sorted(ended.values())


def _standing(kube: KubeTestbed) -> Object | None:
    """How the job stands; None: it is gone."""
    found = kube.objects("pytorchjobs", NAMESPACE)
    if not found:
        return None
    status = found[0]["status"]
    replicas = status.get("replicaStatuses") or {}
    return {
        "conditions": sorted(map(_condition, status["conditions"])),
        "replicas": {kind: dict(sorted(each.items())) for kind, each in sorted(replicas.items())},
        "startTime": "startTime" in status,
        "completionTime": "completionTime" in status,
    }


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


def _told(changes: Iterable[Change]) -> list[str]:
    """Events about the job itself, from any controller that reconciles it."""
    return sorted(
        {
            f"{event['type']} {event['reason']}: {event['message']}"
            for change, event in changes
            if change != "DELETED" and event["involvedObject"]["kind"] == "PyTorchJob"
        }
    )


def _shapes(changes: Iterable[Change], shape: Any) -> dict[str, Object]:
    made = [thing for change, thing in changes if change == "ADDED"]
    return {thing["metadata"]["name"]: shape(thing) for thing in made}


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
        "labels": dict(sorted(metadata["labels"].items())),
        "annotations": metadata.get("annotations", {}),
        "owners": [
            {key: value for key, value in owner.items() if key != "uid"}
            for owner in metadata["ownerReferences"]
        ],
    }


def place(scenario: Scenario) -> Path:
    return FOLDER / f"pytorchjob-{scenario.name}.yaml"


def read(scenario: Scenario) -> list[Step]:
    found: list[Step] = yaml.safe_load(place(scenario).read_text())["steps"]
    return found


class _Dumper(yaml.SafeDumper):
    """Each thing where it belongs, also what is there twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main(operator: str, times: str = "4", *names: str) -> None:
    if "PyTorchJob" not in {project.kind for project in real_operators.available()}:
        sys.exit("KUBE_OPERATORS names no folder with training-operator: only stand-ins are here")
    FOLDER.mkdir(exist_ok=True)
    with running_testbed() as kube:
        about = {
            "operator": operator,
            "kubernetes": kube.version,
            "on": f"{datetime.now(UTC):%Y-%m-%d}",
            "recordings": int(times),
        }
        for scenario in SCENARIOS:
            if not names or scenario.name in names:
                steps = merged([_recorded(kube, scenario) for _ in range(int(times))])
                text = yaml.dump(
                    {**about, "steps": steps}, Dumper=_Dumper, sort_keys=False, width=100
                )
                place(scenario).write_text(text)
                sys.stdout.write(f"{place(scenario)}\n")


def _recorded(kube: KubeTestbed, scenario: Scenario) -> list[Step]:
    kube.restore()
    return record(kube, scenario)


if __name__ == "__main__":
    main(*sys.argv[1:])
