"""Stand-in for Kubeflow Trainer v2.0, which turns a TrainJob into its runtime's JobSet."""

import copy
from dataclasses import dataclass

from tests.kubernetes.standins.api import Api, ApiError, Object, owned_by, path
from tests.kubernetes.standins.operator import has_condition, set_condition, write_status

TRAINER = "node"
"""Name of the replicatedJob that trains, and of its container."""
PORT = "29500"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
CONDITIONS = {"Completed": "Complete", "Failed": "Failed"}
"""Conditions of the JobSet that Trainer copies, and their names in the TrainJob."""
TORCH: Object = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "ClusterTrainingRuntime",
    "metadata": {"name": "torch-distributed"},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": "auto"}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": TRAINER,
                        "template": {
                            "metadata": {"labels": {ANCESTOR: "trainer"}},
                            "spec": {
                                "template": {
                                    "spec": {"containers": [{"name": TRAINER, "image": "torch"}]}
                                }
                            },
                        },
                    }
                ]
            }
        },
    },
}
"""The runtime that Trainer installs."""


@dataclass(frozen=True)
class TrainJobs:
    api: Api
    resource: str = "trainjobs"

    async def reconcile(self, job: Object, pods: list[Object]) -> None:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        status = copy.deepcopy(job.get("status") or {})
        try:
            runtime = await self._runtime(job)
        except ApiError as exc:
            message = f"the runtime does not exist: {exc}"
            kind = "TrainingRuntimeNotSupported"
            set_condition(status.setdefault("conditions", []), "Failed", True, kind, message)
            await write_status(self.api, self.resource, job, status)
            return
        suspended = bool(job["spec"].get("suspend"))
        where = path("jobsets", namespace, name)
        try:
            jobset = await self.api.get(where)
        except ApiError:
            made = _jobset(job, runtime)
            jobset = await self.api.create(path("jobsets", namespace), made) or made
        if bool(jobset["spec"].get("suspend")) != suspended:
            await self.api.patch(where, {"spec": {"suspend": suspended}})
        conditions = status.setdefault("conditions", [])
        if suspended:
            set_condition(conditions, "Suspended", True, "Suspended", "TrainJob is suspended")
        elif has_condition(conditions, "Suspended"):
            set_condition(conditions, "Suspended", False, "Resumed", "TrainJob is resumed")
        for each in jobset.get("status", {}).get("conditions", ()):
            holds = each["status"] == "True"
            if each["type"] in CONDITIONS:
                kind = CONDITIONS[each["type"]]
                set_condition(conditions, kind, holds, each["reason"], each["message"])
        status["jobsStatus"] = jobset.get("status", {}).get("replicatedJobsStatus", [])
        await write_status(self.api, self.resource, job, status)

    async def _runtime(self, job: Object) -> Object:
        ref = job["spec"]["runtimeRef"]
        if ref.get("kind", "ClusterTrainingRuntime") == "TrainingRuntime":
            namespace = job["metadata"]["namespace"]
            return await self.api.get(path("trainingruntimes", namespace, ref["name"]))
        return await self.api.get(path("clustertrainingruntimes", "", ref["name"]))


def _jobset(job: Object, runtime: Object) -> Object:
    spec = copy.deepcopy(runtime["spec"]["template"]["spec"])
    policy = runtime["spec"].get("mlPolicy") or {}
    trainer = job["spec"].get("trainer") or {}
    count = trainer.get("numNodes", policy.get("numNodes", 1))
    ranks = trainer.get("numProcPerNode", (policy.get("torch") or {}).get("numProcPerNode", "auto"))
    for each in spec["replicatedJobs"]:
        inner = each["template"]["spec"]
        if each["template"].get("metadata", {}).get("labels", {}).get(ANCESTOR) == "trainer":
            inner |= {"parallelism": count, "completions": count, "completionMode": "Indexed"}
            for container in inner["template"]["spec"]["containers"]:
                if container["name"] == TRAINER:
                    _train(container, trainer, _torch(job, each["name"], count, ranks))
        for override in job["spec"].get("podSpecOverrides", ()):
            if each["name"] in [target["name"] for target in override["targetJobs"]]:
                _override(inner["template"]["spec"], override)
        for container in inner["template"]["spec"]["containers"]:
            container.setdefault("image", "torch")
    spec["suspend"] = bool(job["spec"].get("suspend"))
    name, marks = job["metadata"]["name"], job["spec"]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "labels": marks.get("labels", {}),
            "annotations": marks.get("annotations", {}),
            "ownerReferences": owned_by(job),
        },
        "spec": spec,
    }


def _train(container: Object, trainer: Object, environ: list[Object]) -> None:
    for key in ("image", "command", "args"):
        if key in trainer:
            container[key] = trainer[key]
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    container["env"] = [*container.get("env", ()), *trainer.get("env", ()), *environ]


def _torch(job: Object, kind: str, count: int, ranks: object) -> list[Object]:
    name = job["metadata"]["name"]
    values = {"PET_NNODES": str(count), "PET_NPROC_PER_NODE": str(ranks)}
    values |= {"PET_MASTER_ADDR": f"{name}-{kind}-0-0.{name}", "PET_MASTER_PORT": PORT}
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return [rank, *({"name": key, "value": value} for key, value in values.items())]


def _override(spec: Object, override: Object) -> None:
    for key, value in override.items():
        if key == "containers":
            by_name = {container["name"]: container for container in spec["containers"]}
            for each in value:
                for part in ("env", "volumeMounts"):
                    mine = by_name[each["name"]].setdefault(part, [])
                    mine += each.get(part, ())
        elif isinstance(value, list) and key != "targetJobs":
            spec[key] = [*spec.get(key, ()), *value]
        elif key != "targetJobs":
            spec[key] = value
