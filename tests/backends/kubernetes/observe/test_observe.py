"""Status texts for conditions, pods and events, with objects as in real clusters."""

from typing import Any

import pytest
from msgspec.structs import replace

from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Listed
from orchestrator.backends.kubernetes.backend import sighting_of
from orchestrator.backends.kubernetes.observe.object_fields import begun_at, seconds_of
from orchestrator.backends.kubernetes.observe.observe import (
    Observed,
    cause,
    observe,
    taken,
    with_notes,
)
from orchestrator.backends.kubernetes.observe.pending_reasons import pod_problem
from orchestrator.backends.kubernetes.resources import (
    EVENTS,
    JOB_KINDS,
    NAMESPACES,
    Object,
    Resource,
)
from orchestrator.backends.kubernetes.status_cache import look
from orchestrator.contract.spec.kubernetes_spec import Kind
from tests.backends.kubernetes.rendered import PLAIN, a_launch

PYTORCHJOB = JOB_KINDS["pytorchjob"]
NAME = "PyTorchJob team-a/run-1"


def job(*conditions: str, suspend: bool = False, queue: str = "", **notes: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "run-1",
            "labels": {"kueue.x-k8s.io/queue-name": queue} if queue else {},
            "annotations": {
                "ndctl.dev/launch": "3",
                **{f"ndctl.dev/{k.replace('_', '-')}": v for k, v in notes.items()},
            },
        },
        "spec": {"runPolicy": {"suspend": suspend}},
        "status": {
            "conditions": [
                {"type": one, "status": "True", "reason": f"PyTorchJob{one}", "message": f"{one}!"}
                for one in conditions
            ]
        },
    }


def pod(name: str = "run-1-worker-0", phase: str = "Pending", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"ndctl.dev/job": "run-1"}},
        "spec": {"nodeName": "node-7"},
        "status": {"phase": phase, **status},
    }


def condition(kind: str, status: str, reason: str, message: str = "") -> list[dict[str, str]]:
    return [{"type": kind, "status": status, "reason": reason, "message": message}]


def waiting(why: str, message: str = "", **last: Any) -> list[dict[str, Any]]:
    state = {"waiting": {"reason": why, "message": message}}
    return [{"name": "pytorch", "state": state, "lastState": {"terminated": last} if last else {}}]


def going(node: str) -> dict[str, Any]:
    """A deleted pod, with or without the confirmation of its node."""
    found = pod(phase="Running", containerStatuses=[{"state": {"running": {}}}])
    found["metadata"] |= {"namespace": "team-a", "deletionTimestamp": "2026-11-22T05:00:30Z"}
    found["spec"]["nodeName"] = node
    return found


def event(
    about: str,
    reason: str,
    message: str,
    kind: str = "Pod",
    uid: str = "",
    at: str = "2026-11-22T05:00:00Z",
) -> dict[str, Any]:
    return {
        "involvedObject": {"kind": kind, "name": about, **({"uid": uid} if uid else {})},
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
    }


NO_GPUS = (
    "0/3 nodes are available: 1 Insufficient memory, 3 Insufficient nvidia.com/gpu. preemption:"
    " 0/3 nodes are available: 3 No preemption victims found for incoming pod."
)
TAINTED = (
    "0/2 nodes are available: 2 node(s) had taint {dedicated: ml}, that the pod didn't tolerate."
)
NO_CLAIM = '0/2 nodes are available: 2 persistentvolumeclaim "runs" not found.'

TROUBLES = [
    (pod(phase="Running"), None, ""),
    (
        pod(conditions=condition("PodScheduled", "False", "Unschedulable", NO_GPUS)),
        "Unschedulable (insufficient memory, nvidia.com/gpu)",
        "too few nodes have that much free",
    ),
    (
        pod(conditions=condition("PodScheduled", "False", "Unschedulable", TAINTED)),
        "Unschedulable",
        "cluster.kubernetes.tolerations",
    ),
    (
        pod(conditions=condition("PodScheduled", "False", "Unschedulable", NO_CLAIM)),
        "Unschedulable",
        "PersistentVolumeClaim",
    ),
    (
        pod(conditions=condition("PodScheduled", "False", "SchedulingGated", "gated")),
        "SchedulingGated",
        "Kueue",
    ),
    (
        pod(containerStatuses=waiting("ImagePullBackOff", 'Back-off pulling image "x"')),
        "ImagePullBackOff",
        "cluster.kubernetes.image",
    ),
    (
        pod(containerStatuses=waiting("CreateContainerConfigError", 'secret "t" not found')),
        "CreateContainerConfigError",
        'secret "t" not found',
    ),
    (
        pod(phase="Running", containerStatuses=waiting("CrashLoopBackOff", "", exitCode=1)),
        "CrashLoopBackOff",
        "exit code 1",
    ),
    (
        pod(
            phase="Running",
            containerStatuses=waiting("CrashLoopBackOff", reason="OOMKilled", exitCode=137),
        ),
        "OOMKilled",
        "cluster.kubernetes.memory",
    ),
    (
        pod(
            phase="Failed",
            containerStatuses=[{"state": {"terminated": {"reason": "Error", "exitCode": 78}}}],
        ),
        "Error",
        "exit code 78",
    ),
    (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory. "),
        "Evicted",
        "low on resource: memory",
    ),
    (
        pod(
            phase="Running",
            conditions=condition("DisruptionTarget", "True", "PreemptionByScheduler", "by team-b"),
        ),
        "Preempted",
        "higher priority",
    ),
    (
        pod(
            phase="Running",
            conditions=condition("DisruptionTarget", "True", "DeletionByTaintManager"),
        ),
        "node lost",
        "is unreachable",
    ),
    (
        going("node-7"),
        "Terminating",
        "`kubectl -n team-a delete pod run-1-worker-0 --force --grace-period=0`",
    ),
]


@pytest.mark.parametrize(("given", "what", "words"), TROUBLES)
def test_a_pods_problem_has_a_reason_and_a_fix(
    given: dict[str, Any], what: str | None, words: str
) -> None:
    found = pod_problem(given)
    assert (found.what if found else None) == what
    assert words in str(found or "")


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("ndctl.dev/job", "too few free nodes in one topology domain"),
        ("job-name", "its affinity requires pods with job-name In ['run-1'] nearby"),
    ],
)
def test_an_affinity_that_names_other_pods_is_no_lack_of_nodes(label: str, words: str) -> None:
    message = "0/8 nodes are available: 8 node(s) didn't match pod affinity rules."
    waits = pod(conditions=condition("PodScheduled", "False", "Unschedulable", message))
    selector = {"matchLabels": {label: "run-1"}}
    terms = [{"labelSelector": selector, "topologyKey": "zone"}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    waits["spec"]["affinity"] = {"podAffinity": required}
    assert words in pod_problem(waits).advice  # type: ignore[union-attr]


def test_the_registrys_message_is_preferred_to_the_kubelets_back_off() -> None:
    events = [
        event("run-1-worker-0", "Failed", "Error: ImagePullBackOff"),
        event("run-1-worker-0", "Failed", 'Failed to pull image "x": manifest unknown'),
    ]
    found = pod_problem(pod(containerStatuses=waiting("ImagePullBackOff", "Back-off")), events)
    assert found is not None
    assert found.why == 'Failed to pull image "x": manifest unknown'


def test_a_pod_that_waits_after_preemption_names_the_preemptor() -> None:
    waits = pod(conditions=condition("PodScheduled", "False", "Unschedulable", NO_GPUS))
    found = pod_problem(waits, [event("run-1-worker-0", "Preempted", "by team-b/x on node node-7")])
    assert found is not None
    assert found.what == "Unschedulable (insufficient memory, nvidia.com/gpu)"
    assert found.why.endswith("its previous pod was preempted: by team-b/x on node node-7")


def test_a_volume_that_cannot_be_mounted_is_named() -> None:
    events = [event("run-1-worker-0", "FailedMount", 'configmap "run-1-launch" not found')]
    found = pod_problem(pod(containerStatuses=waiting("ContainerCreating")), events)
    assert found is not None
    assert found.why == 'configmap "run-1-launch" not found'
    assert pod_problem(pod(containerStatuses=waiting("ContainerCreating"))) is None


def mounting(*events: dict[str, Any]) -> str:
    """A pod that has been in ContainerCreating for some time."""
    given = pod(containerStatuses=waiting("ContainerCreating"))
    given["metadata"]["uid"] = "u2"
    found = pod_problem(given, events)
    return found.what if found else ""


@pytest.mark.parametrize("reason", ["FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"])
def test_a_failure_that_the_kubelet_overcame_is_no_problem(reason: str) -> None:
    failed = event("run-1-worker-0", reason, "timed out", uid="u2")
    assert mounting(failed) == reason
    for then in ("Pulling", "Pulled", "Created"):
        for at in ("2026-11-22T05:00:00Z", "2026-11-22T05:00:40Z"):
            assert mounting(failed, event("run-1-worker-0", then, "", uid="u2", at=at)) == ""
    before = event("run-1-worker-0", "Pulled", "", uid="u2", at="2026-11-22T04:59:00Z")
    assert mounting(before, failed) == reason, "the image of an init container was present"


def test_events_of_a_pods_predecessor_are_ignored() -> None:
    """An operator gives a new pod the name of the one that it replaces."""
    assert mounting(event("run-1-worker-0", "FailedMount", "timed out", uid="u1")) == ""
    given = pod(containerStatuses=waiting("ImagePullBackOff", "Back-off"))
    given["metadata"]["uid"] = "u2"
    found = pod_problem(given, [event("run-1-worker-0", "Failed", "no such image", uid="u1")])
    assert (found and found.why) == "Back-off"


RUNNING = pod("run-1-master-0", phase="Running")


def deleted(item: dict[str, Any], grace_s: int = 0) -> dict[str, Any]:
    until = {"deletionTimestamp": "2026-11-22T05:00:30Z", "deletionGracePeriodSeconds": grace_s}
    return {**item, "metadata": {**item["metadata"], **until}}


STANDINGS = [
    (None, [], "missing", True, "was deleted (unknown who deleted it)"),
    (None, [RUNNING], "missing", False, "deleted (unknown who deleted it); 1 pod may still write"),
    (deleted(job("Running")), [RUNNING], "leaving", False, "is being deleted"),
    (deleted(job("Succeeded")), [], "succeeded", True, "has ended"),
    (job("Created"), [], "waiting", False, "no pod exists yet"),
    (job("Created", "Running"), [RUNNING, pod()], "running", False, "1 of 2 pods run"),
    (job("Created", "Succeeded"), [], "succeeded", True, "Succeeded"),
    (job("Failed"), [], "failed", True, "has Failed: Failed!"),
    (job("Failed"), [RUNNING], "failed", False, "has Failed"),
    (job("Suspended", suspend=True), [], "suspended", False, "is suspended"),
    (job(suspend=True, queue="ml"), [], "suspended", False, "waits in Kueue's queue ml"),
    (job(suspend=True, cancelled_by="ann"), [], "suspended", True, "cancelled by ann"),
]


@pytest.mark.parametrize(("given", "pods", "meaning", "over", "words"), STANDINGS)
def test_the_state_of_a_job_follows_from_its_conditions_and_pods(
    given: dict[str, Any] | None, pods: list[dict[str, Any]], meaning: str, over: bool, words: str
) -> None:
    seen = observe(PYTORCHJOB, NAME, given, pods)
    assert (seen.meaning, seen.is_over) == (meaning, over)
    assert words in seen.words


@pytest.mark.parametrize(
    ("given", "pods", "over"),
    [
        (None, [deleted(RUNNING, 30)], "CANCELLED"),
        (deleted(job("Running")), [], "CANCELLED"),
        (job(suspend=True, cancelled_by="ann"), [], "CANCELLED"),
        (job("Succeeded"), [RUNNING], "SUCCEEDED"),
        (job("Failed"), [], "FAILED"),
        (job("Running"), [RUNNING], None),
        (job(suspend=True), [], None),
        (job("Created"), [], None),
    ],
)
def test_the_end_of_a_job_is_read_from_its_object(
    given: dict[str, Any] | None, pods: list[dict[str, Any]], over: str | None
) -> None:
    """A job without an object was deleted, so waiting is useless."""
    seen = sighting_of(observe(PYTORCHJOB, NAME, given, pods), a_launch(PLAIN, launch=3))
    assert (seen.over, seen.held) == (over, over is None)
    assert seen.leaving == bool(over and pods)
    if given is None:
        assert seen.at == seconds_of("2026-11-22T05:00:00Z")


LEADS = {"training.kubeflow.org/replica-type": "master"}


def test_the_status_says_whether_the_leaders_pod_runs() -> None:
    other = pod("run-1-worker-0", phase="Running")
    assert not observe(PYTORCHJOB, NAME, job("Running"), [other]).leader_runs
    leader = pod("run-1-master-0", phase="Running")
    leader["metadata"]["labels"] |= LEADS
    seen = observe(PYTORCHJOB, NAME, job("Running"), [other, leader])
    assert sighting_of(seen, a_launch(PLAIN, launch=3)).running


@pytest.mark.parametrize(
    ("namespace", "words"),
    [
        (None, "namespace team-a was deleted, and PyTorchJob team-a/run-1 with it"),
        (deleted({"metadata": {"name": "team-a"}}), "namespace team-a was deleted"),
        ({"metadata": {"name": "team-a"}}, "PyTorchJob team-a/run-1 was deleted (unknown who"),
        (Forbidden("no right to namespaces"), "PyTorchJob team-a/run-1 was deleted (unknown who"),
    ],
)
def test_a_job_that_went_with_its_namespace_says_so(namespace: Any, words: str) -> None:
    class Cluster:
        def get(self, resource: Resource, space: str | None, name: str) -> Object | None:
            if resource != NAMESPACES:
                return None
            if isinstance(namespace, Exception):
                raise namespace
            found: Object | None = namespace
            return found

        def list(self, *_: Any, **__: Any) -> Listed:
            return Listed(items=(), version="1")

    launch = replace(a_launch(PLAIN), job="run-1")
    (seen,) = look(Cluster(), "team-a", PYTORCHJOB, [launch])  # type: ignore[arg-type]
    assert words in seen.words
    assert seen.ending == "CANCELLED"


def test_without_the_right_to_events_only_the_reasons_for_waiting_are_missing() -> None:
    class Cluster:
        pods: tuple[Object, ...] = ()

        def get(self, *_: Any) -> Object:
            return job("Created")

        def about(self, *_: Any) -> Object | None:
            return None

        def list(self, resource: Resource, *_: Any, **__: Any) -> Listed:
            if resource == EVENTS:
                raise Forbidden("dev may not list events in namespace team-a", fix="ask for it")
            return Listed(items=self.pods, version="1")

    cluster: Any = Cluster()
    launch = replace(a_launch(PLAIN, hosts=1), job="run-1")
    (seen,) = look(cluster, "team-a", PYTORCHJOB, [launch])
    assert seen.meaning == "waiting"
    assert "unknown reason: dev may not list events in namespace team-a" in seen.words
    lacks = condition("PodScheduled", "False", "Unschedulable", NO_GPUS)
    cluster.pods = (pod(conditions=lacks),)
    (seen,) = look(cluster, "team-a", PYTORCHJOB, [launch])
    assert "may not list" not in seen.words, "the status of the pod has the reason"


REFUSED = [
    ('pods "run-1-master-0" is forbidden: exceeded quota: gpus, requested: ...', "quota exceeded"),
    ('pods "x" is forbidden: violates PodSecurity "restricted:latest": ...', "admission refused"),
    ('admission webhook "v.example" denied the request: no', "admission refused"),
    ("dial tcp: i/o timeout", "cannot create pods"),
]


@pytest.mark.parametrize(("message", "what"), REFUSED)
def test_events_explain_pods_that_were_never_created(message: str, what: str) -> None:
    events = [event("run-1", "FailedCreatePod", message, kind="PyTorchJob")]
    seen = observe(PYTORCHJOB, NAME, job("Created"), (), events)
    assert [one.what for one in seen.troubles] == [what]
    assert message in seen.words
    other = observe(PYTORCHJOB, NAME, job("Created"), (), [event("run-10", "FailedCreate", "no")])
    assert other.troubles == ()


INVALID = (
    'Error creating: pods.kubeflow.org "x" not created: Pod "x" is invalid:'
    " [spec.containers[0].securityContext: Invalid value: core.SecurityContext{Capabilities:"
    "(*core.Capabilities)(0xc00618e360), Privileged:(*bool)(0xc012)}: cannot set"
    ' allowPrivilegeEscalation to false and privileged to true, spec.x: Invalid value: "5": no]'
)
"""As the API server of 1.20 answers."""
LIMIT = 'pods "x" is forbidden: maximum cpu usage per Container is 1, but limit is 2'
NO_ACCOUNT = 'pods "x" is forbidden: error looking up service account a/b: not found'


@pytest.mark.parametrize(
    ("message", "needs_fix"),
    [
        *((message, what == "admission refused") for message, what in REFUSED),
        *((INVALID, True), (LIMIT, True), (NO_ACCOUNT, False)),
    ],
)
def test_pods_that_no_wait_creates_need_a_fix(message: str, needs_fix: bool) -> None:
    events = [event("run-1", "FailedCreatePod", message, kind="PyTorchJob")]
    given, launch = job("Created"), a_launch(PLAIN, launch=3)
    seen = sighting_of(observe(PYTORCHJOB, NAME, given, (), events), launch)
    assert bool(seen.needs) == needs_fix
    made = observe(PYTORCHJOB, NAME, given, [RUNNING], events, hosts=1)
    assert not sighting_of(made, launch).needs, "the event is old"


def test_the_reason_of_invalid_pods_has_no_addresses_of_memory() -> None:
    events = [event("run-1", "FailedCreatePod", INVALID, kind="PyTorchJob")]
    said = observe(PYTORCHJOB, NAME, job("Created"), (), events).words
    assert said.endswith(
        "[spec.containers[0].securityContext: cannot set allowPrivilegeEscalation to false and"
        ' privileged to true, spec.x: Invalid value: "5": no]'
    )


def noted(one: dict[str, Any], **notes: str) -> Observed:
    """The status of a job with a note of its pods."""
    seen = observe(PYTORCHJOB, NAME, one, [RUNNING], hosts=1)
    return with_notes(seen, one, {f"ndctl.dev/{key}": value for key, value in notes.items()})


def test_a_changed_text_applied_under_the_same_launch_is_reported() -> None:
    """The text has three pods, the run has four. The pods would wait forever for the fourth."""
    seen = noted(job("Running", spec_hash="b"), runs="a")
    assert "differ from launch 3" in seen.words
    assert "`ndctl cancel run-1`, then `ndctl submit SPEC --resume` runs it" in seen.words
    assert noted(job("Running", spec_hash="a"), runs="a").troubles == ()
    assert noted(job("Running", spec_hash="b")).troubles == ()
    assert noted(job("Failed", spec_hash="b"), runs="a").troubles == ()


def test_excluded_nodes_that_accept_new_pods_are_named_with_a_fix() -> None:
    asked = "node-3,node-7"
    seen = noted(job("Running", excluded="node-3"), avoid=asked)
    assert (
        "no controller: new pods may be scheduled to node-7, which the job excludes" in seen.words
    )
    assert "`kubectl apply -k manifests/controller`" in seen.words
    assert "node-3" not in seen.words
    assert noted(job("Running", excluded="node-3,node-5,node-7"), avoid=asked).troubles == ()
    assert noted(job("Failed"), avoid=asked).troubles == ()


OTHERS = [
    event("run-1-node-0", "FailedCreate", "no", kind="PyTorchJob"),
    event("run-1-b", "FailedCreatePod", "no", kind="PyTorchJob"),
    event("run-1-b-node-0", "FailedCreate", "no", kind="Job"),
    event("run-1", "FailedCreatePod", "no", kind="PyTorchJob", uid="deleted"),
    event("run-1-node-0", "FailedCreate", "no", kind="Job", at="2026-11-22T04:00:00Z"),
    event("pytorchjob-run-1-b-a1b2c", "Pending", "no", kind="Workload"),
    event("pytorchjob-a-run-1-a1b2c", "Pending", "no", kind="Workload"),
    event("jobset-run-1-a1b2c", "Pending", "no", kind="Workload"),
    event("pytorchjob-run-1-a1b2c", "Pending", "no", kind="Workload", at="2026-11-22T04:00:00Z"),
]


@pytest.mark.parametrize("theirs", OTHERS)
def test_other_jobs_and_former_jobs_of_the_name_are_ignored(theirs: dict[str, Any]) -> None:
    mine = job(suspend=True, queue="ml")
    mine["metadata"] |= {"uid": "mine", "creationTimestamp": "2026-11-22T04:59:00Z"}
    assert observe(PYTORCHJOB, NAME, mine, (), [theirs]).troubles == ()


@pytest.mark.parametrize(
    ("kind", "about"),
    [
        ("jobset", {"about": "run-1", "kind": "JobSet", "uid": "mine"}),
        ("jobset", {"about": "run-1-node-0", "kind": "Job", "uid": "its own"}),
        ("trainjob", {"about": "run-1", "kind": "JobSet", "uid": "its own"}),
        ("trainjob", {"about": "run-1-node-0", "kind": "Job", "uid": "its own"}),
    ],
)
def test_objects_that_operators_make_count_as_the_jobs(kind: Kind, about: dict[str, str]) -> None:
    mine = job()
    mine["metadata"] |= {"uid": "mine", "creationTimestamp": "2026-11-22T05:00:01Z"}
    said = event(reason="FailedCreate", message="exceeded quota: gpus", **about)
    seen = observe(JOB_KINDS[kind], NAME, mine, (), [said])
    assert [one.what for one in seen.troubles] == ["quota exceeded"]


def test_the_reason_why_kueue_waits_is_shown() -> None:
    said = "couldn't assign flavors to pod set master: insufficient quota for nvidia.com/gpu"
    events = [event("pytorchjob-run-1-a1b2c", "Pending", said, kind="Workload")]
    seen = observe(PYTORCHJOB, NAME, job(suspend=True, queue="ml"), (), events)
    assert said in seen.words


def test_problems_that_need_a_person_come_first() -> None:
    waits = pod("run-1-a", conditions=condition("PodScheduled", "False", "Unschedulable", NO_GPUS))
    image = pod("run-1-b", containerStatuses=waiting("ErrImagePull", "not found"))
    seen = observe(PYTORCHJOB, NAME, job(), [waits, image])
    assert [one.pod for one in seen.troubles] == ["run-1-b", "run-1-a"]
    assert "1 more pods with problems" in seen.words


LEAVING = {**RUNNING, "metadata": {**RUNNING["metadata"], "deletionTimestamp": "now"}}
PREEMPTED = pod(conditions=condition("DisruptionTarget", "True", "PreemptionByScheduler"))
DRAINED = pod(conditions=condition("DisruptionTarget", "True", "EvictionByEvictionAPI"))


@pytest.mark.parametrize(
    ("given", "own", "why"),
    [
        (None, LEAVING, "cancelled"),
        (job(cancelled_by="ann", suspend=True), LEAVING, "cancelled"),
        (job(suspend=True), LEAVING, "requeued"),
        (job(suspend=True, queue="ml"), LEAVING, "preempted"),
        (job("Running"), PREEMPTED, "preempted"),
        (job("Running"), DRAINED, "drained"),
        (job("Running"), LEAVING, "requeued"),
        (job("Running"), RUNNING, "unknown"),
    ],
)
def test_the_reason_why_a_leader_is_ended_is_known(
    given: dict[str, Any] | None, own: dict[str, Any], why: str
) -> None:
    assert cause(PYTORCHJOB, given, own, 3) == why


@pytest.mark.parametrize(
    ("state", "begun"),
    [
        ({"waiting": {"reason": "ContainerCreating"}}, 1000.0),
        ({"running": {"startedAt": "1970-01-01T00:16:42Z"}}, 1002.0),
        ({"terminated": {"exitCode": 1}}, 1000.0),
    ],
)
def test_a_pods_start_is_that_of_its_current_container(state: dict[str, Any], begun: float) -> None:
    """JobSet restarts a container within the same pod."""
    given = pod(containerStatuses=[{"state": state}])
    given["metadata"]["creationTimestamp"] = "1970-01-01T00:16:40Z"
    assert begun_at(given) == begun


def evicted(about: str = "run-1-worker-0", node: str = "node-7") -> dict[str, Any]:
    """The event that a kubelet writes before it kills a pod."""
    said = event(about, "Evicted", "The node was low on resource: memory. ")
    return {**said, "source": {"component": "kubelet", "host": node}}


AT = seconds_of("2026-11-22T05:00:00Z")
LOW = "Evicted: The node was low on resource: memory."
GONE = pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory. ")


@pytest.mark.parametrize(
    ("pods", "events", "said"),
    [
        ([GONE], [], LOW),
        ([], [evicted()], LOW),
        ([pod(phase="Running")], [evicted()], LOW),  # already replaced, on the same node
        ([pod(phase="Failed", reason="Preempting")], [], "Preempted"),
        ([pod(phase="Failed", reason="NodeLost")], [], ""),
        ([pod(phase="Failed")], [], ""),
        ([], [evicted(node="node-8")], ""),
        ([], [evicted("run-10-worker-0")], ""),
        ([], [evicted("run-1-b-worker-0")], ""),
        ([], [evicted("run-1-node-0-0-a1b2c")], ""),
        ([], [event("run-1-worker-0", "Killing", "Stopping container")], ""),
    ],
)
def test_a_pod_killed_by_kubernetes_is_recognised_by_status_or_event(
    pods: list[dict[str, Any]], events: list[dict[str, Any]], said: str
) -> None:
    assert taken("pytorchjob", "run-1", "node-7", pods, events, AT - 5) == said


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_pods_of_jobs_are_known_by_their_names(kind: Kind) -> None:
    mine, theirs = evicted("run-1-node-0-11-a1b2c"), evicted("run-1-node-0-node-0-11-a1b2c")
    assert taken(kind, "run-1", "node-7", [], [mine], AT - 5) == LOW
    assert taken(kind, "run-1", "node-7", [], [theirs], AT - 5) == ""


def test_an_eviction_of_another_day_is_ignored() -> None:
    assert taken("pytorchjob", "run-1", "node-7", [], [evicted()], AT + 1) == ""
    later = {**pod("run-1-worker-0-b", phase="Failed"), "metadata": {"name": "run-1-worker-0-b"}}
    later["metadata"]["creationTimestamp"] = "2026-11-22T06:00:00Z"
    assert taken("pytorchjob", "run-1", "node-7", [GONE, later], [], AT) == ""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("12:00 INFO leading\n12:01 CRITICAL no right\n  fix: ask\n", "no right fix: ask"),
        ("rank 0 began\nTraceback:\nValueError: x\n\n", "ValueError: x"),
        ('leaving with 1\nndctl-journal: {"v":1}\nndctl-metrics: {}\n', "leaving with 1"),
        ("", ""),
    ],
)
def test_the_cause_of_death_is_read_from_the_end_of_a_pods_log(log: str, said: str) -> None:
    ended = [{"state": {"terminated": {"reason": "Error", "exitCode": 78, "message": log}}}]
    trouble = pod_problem(pod(phase="Failed", containerStatuses=ended))
    assert trouble is not None
    assert trouble.why == ("exit code 78" + (f": {said}" if said else ""))


@pytest.mark.parametrize(("hosts", "back"), [(2, '{"replicas": 1}'), (1, "null")])
def test_a_changed_number_of_pods_is_said_before_pods_without_a_node(hosts: int, back: str) -> None:
    one = job("Running")
    one["metadata"]["namespace"] = "team-a"
    one["spec"]["pytorchReplicaSpecs"] = {"Master": {"replicas": 1}, "Worker": {"replicas": 3}}
    unplaced = pod(conditions=condition("PodScheduled", "False", "Unschedulable", NO_GPUS))
    seen = observe(PYTORCHJOB, NAME, one, [unplaced], hosts=hosts)
    said = f"and the job has {hosts} host" + "s" * (hosts > 1)
    patch = f'{{"pytorchReplicaSpecs": {{"Worker": {back}}}}}'
    assert f"; wrong number of pods: the PyTorchJob asks for 4 pods, {said}" in seen.words
    command = "`kubectl -n team-a patch pytorchjobs.kubeflow.org run-1 --type merge"
    assert f"{command} -p '{{\"spec\": {patch}}}'`" in seen.words
    assert not seen.needs_fix
    assert "wrong number" not in observe(PYTORCHJOB, NAME, one, hosts=4).words
    one["status"] = job("Succeeded")["status"]
    assert observe(PYTORCHJOB, NAME, one, hosts=hosts).troubles == ()
