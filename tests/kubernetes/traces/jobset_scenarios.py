"""The recorded scenarios of a JobSet: one Job of three indexed pods, with the policies that ndctl
renders."""

import yaml

from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.controller.actions import Delete, Ref
from orchestrator.backends.kubernetes.controller.loop import perform
from orchestrator.backends.kubernetes.finalizers import failed
from orchestrator.backends.kubernetes.resources import PODS as PODS_RESOURCE
from orchestrator.system import SystemClock
from tests.kubernetes.standins.api import Object
from tests.kubernetes.testbed import REPOSITORY
from tests.kubernetes.traces.scenarios import (
    JOB,
    JOB_IS_DELETED,
    Action,
    JobKind,
    JobUnderTest,
    Scenario,
    is_terminating,
    lose_node_and_delete_pod,
    pod_template,
    suspended_and_resumed,
    were_recreated,
)

NODE = "node"
LEADER, FIRST, SECOND = (f"{JOB}-{NODE}-0-{index}" for index in range(3))
PODS = (LEADER, FIRST, SECOND)
REPLICATED_JOB = "jobset.sigs.k8s.io/replicatedjob-name"


def _is_running(job: Object) -> bool:
    counts = job.get("status", {}).get("replicatedJobsStatus", ())
    return any(each["ready"] == 1 for each in counts)


def _status(status: Object) -> Object:
    return {
        "replicatedJobsStatus": status.get("replicatedJobsStatus", []),
        "restarts": status.get("restarts", 0),
        "terminalState": status.get("terminalState", ""),
    }


JOBSET = JobKind(
    kind="JobSet",
    resource="jobsets",
    pods=PODS,
    makes=(("jobs", REPLICATED_JOB),),
    group_label=REPLICATED_JOB,
    suspend=("suspend",),
    is_running=_is_running,
    status=_status,
)


def rendered(kind: str, example: str) -> Object:
    """The object of this kind in a file of `manifests/examples`."""
    text = (REPOSITORY / "manifests" / "examples" / f"{example}.yaml").read_text()
    everything = yaml.load_all(text, yaml.CSafeLoader)
    (found,) = (each for each in everything if each["kind"] == kind)
    found["metadata"] = {"name": JOB}
    output: Object = found
    return output


def with_own_pods(tested: JobUnderTest, jobset: Object) -> None:
    """Gives a JobSet's spec pods that run no ndctl."""
    (replicated,) = jobset["replicatedJobs"]
    spec = replicated["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]["name"]
    spec["template"] = pod_template(tested, container, restartPolicy="Never")


def objects(tested: JobUnderTest) -> list[Object]:
    jobset = rendered("JobSet", "jobset")
    with_own_pods(tested, jobset["spec"])
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"] |= {
        "parallelism": len(PODS),
        "completions": len(PODS),
    }
    return [jobset]


def _fail_and_delete_by_force(tested: JobUnderTest) -> None:
    """What ndctl's controller does. Deletion by force alone has no effect, because the Job's
    finalizer holds the pod until it has failed."""
    api = Api(None, {"KUBECONFIG": str(tested.kube.kubeconfig)}, SystemClock())
    pod = tested.pods()[FIRST]
    what = Ref.of(PODS_RESOURCE, pod)
    perform(api, Delete(what=what, reason="lost", grace_s=0, status=failed(pod)))


def _scenario(name: str, *actions: Action) -> Scenario:
    return Scenario(name, JOBSET, objects, actions)


SCENARIOS = (
    _scenario(
        "leader-ends-well",
        Action(
            "the leader ends with 0",
            lambda tested: tested.end_process(LEADER, 0),
            lambda tested: tested.has_condition("Completed") and tested.nothing_runs(),
        ),
    ),
    _scenario(
        "follower-ends-well-first",
        Action(
            "a follower ends with 0",
            lambda tested: tested.end_process(FIRST, 0),
            lambda tested: tested.phase_of(FIRST) == "Succeeded",
        ),
        Action(
            "the leader ends with 0",
            lambda tested: tested.end_process(LEADER, 0),
            lambda tested: tested.has_condition("Completed") and tested.nothing_runs(),
        ),
    ),
    _scenario(
        "follower-ends-with-211",
        Action(
            "a follower ends with 211",
            lambda tested: tested.end_process(SECOND, 211),
            were_recreated(SECOND),
        ),
    ),
    _scenario(
        "follower-ends-with-3",
        Action(
            "a follower ends with 3",
            lambda tested: tested.end_process(SECOND, 3),
            lambda tested: tested.has_condition("Failed") and tested.nothing_runs(),
        ),
    ),
    _scenario(
        "processes-are-killed",
        Action(
            "a follower's process is killed",
            lambda tested: tested.kill_process(FIRST),
            were_recreated(FIRST),
        ),
        Action(
            "the leader's process is killed",
            lambda tested: tested.kill_process(LEADER),
            were_recreated(LEADER),
        ),
    ),
    _scenario(
        "pods-are-deleted",
        Action(
            "a follower is deleted", lambda tested: tested.delete_pod(FIRST), were_recreated(FIRST)
        ),
        Action(
            "the leader is deleted",
            lambda tested: tested.delete_pod(LEADER),
            were_recreated(LEADER),
        ),
    ),
    _scenario(
        "node-is-lost",
        Action(
            "a follower's node is lost, and its pod is deleted",
            lose_node_and_delete_pod(FIRST),
            is_terminating(FIRST),
        ),
        Action(
            "that pod is marked as failed and deleted by force",
            _fail_and_delete_by_force,
            were_recreated(FIRST),
        ),
    ),
    _scenario("suspended-and-resumed", *suspended_and_resumed(*PODS)),
    _scenario(
        "follower-is-evicted",
        Action(
            "a follower is evicted", lambda tested: tested.evict(SECOND), were_recreated(SECOND)
        ),
    ),
    _scenario("job-is-deleted", JOB_IS_DELETED),
)
