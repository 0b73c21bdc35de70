"""The recorded scenarios of a TrainJob with its own TrainingRuntime, as ndctl renders them.

Trainer's controller creates a JobSet; what happens to its pods is in the recordings of JobSets.
"""

from tests.kubernetes.standins.api import Object
from tests.kubernetes.traces.jobset_scenarios import (
    FIRST,
    LEADER,
    PODS,
    REPLICATED_JOB,
    SECOND,
    rendered,
    with_own_pods,
)
from tests.kubernetes.traces.scenarios import (
    JOB,
    JOB_IS_DELETED,
    Action,
    JobKind,
    JobUnderTest,
    Scenario,
    suspended_and_resumed,
    were_recreated,
)


def _is_running(job: Object) -> bool:
    counts = job.get("status", {}).get("jobsStatus", ())
    return any(each["ready"] == 1 for each in counts)


def _status(status: Object) -> Object:
    return {"jobsStatus": status.get("jobsStatus", [])}


TRAINJOB = JobKind(
    kind="TrainJob",
    resource="trainjobs",
    pods=PODS,
    makes=(("jobs", REPLICATED_JOB), ("jobsets", ""), ("trainingruntimes", "")),
    group_label=REPLICATED_JOB,
    suspend=("suspend",),
    is_running=_is_running,
    status=_status,
)


def objects(tested: JobUnderTest) -> list[Object]:
    runtime, job = rendered("TrainingRuntime", "trainjob"), rendered("TrainJob", "trainjob")
    runtime["metadata"]["labels"] = {"trainer.kubeflow.org/framework": "torch"}
    runtime["spec"]["mlPolicy"]["numNodes"] = job["spec"]["trainer"]["numNodes"] = len(PODS)
    with_own_pods(tested, runtime["spec"]["template"]["spec"])
    job["spec"]["runtimeRef"]["name"] = JOB
    return [runtime, job]


def _scenario(name: str, *actions: Action) -> Scenario:
    return Scenario(name, TRAINJOB, objects, actions)


SCENARIOS = (
    _scenario(
        "leader-ends-well",
        Action(
            "the leader ends with 0",
            lambda tested: tested.end_process(LEADER, 0),
            lambda tested: tested.has_condition("Complete") and tested.nothing_runs(),
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
        "process-is-killed",
        Action(
            "a follower's process is killed",
            lambda tested: tested.kill_process(FIRST),
            were_recreated(FIRST),
        ),
    ),
    _scenario("suspended-and-resumed", *suspended_and_resumed(*PODS)),
    _scenario("job-is-deleted", JOB_IS_DELETED),
)
