"""Stand-in for the kubelets of all fake nodes, the cluster's DNS and its volume provisioner.

A pod that is bound to a fake node runs as local processes.
"""

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.standins import nodes
from tests.kubernetes.standins.api import Api, Informer, Object, path
from tests.kubernetes.standins.nodes import Shape
from tests.kubernetes.standins.pod import PodRun
from tests.kubernetes.standins.processless import is_processless

DELETED_BY_FORCE_S = 1.0
"""Grace period of a pod that was deleted with a grace period of 0; a real kubelet has one too."""


@dataclass
class Kubelet:
    api: Api
    shape: Shape
    folder: Path
    image: Mapping[str, str]
    port: int = 0
    """Port of the server for logs and exec."""
    runs: dict[str, PodRun] = field(default_factory=dict)
    """By uid; includes pods on lost nodes."""
    lost: set[str] = field(default_factory=set)
    nodes_without_images: set[str] = field(default_factory=set)
    """Nodes that cannot pull images."""
    tasks: "set[asyncio.Task[None]]" = field(default_factory=set)
    num_addresses: int = 0
    """Pod addresses that were handed out so far."""

    def __post_init__(self) -> None:
        self.pods = Informer(self.api, "pods", self._pod_changed)
        self.services = Informer(self.api, "services", lambda *_: self._write_hosts())
        self.claims = Informer(self.api, "persistentvolumeclaims", self._claim_changed)

    async def run(self) -> None:
        version = str((await self.api.get("/version"))["gitVersion"])
        for number in range(1, self.shape.nodes + 1):
            await self._register(number, version)
        await asyncio.gather(self.pods.run(), self.services.run(), self.claims.run())

    async def _register(self, number: int, version: str) -> None:
        node = nodes.node(self.shape, number, self.port, version)
        await self.api.create(path("nodes"), node)
        where = path("nodes", "", node["metadata"]["name"], "status")
        await self.api.patch(where, {"status": node["status"]})

    def _pod_changed(self, kind: str, pod: Object) -> None:
        name, uid = pod["spec"].get("nodeName"), pod["metadata"]["uid"]
        if name not in nodes.names(self.shape):
            return
        run = self.runs.get(uid)
        if kind == "DELETED":
            if run is not None and name not in self.lost:
                self._spawn(self._forget(run, DELETED_BY_FORCE_S))
            return
        if run is not None:
            run.pod = pod
        elif name in self.lost or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return
        else:
            run = self._start_pod(pod)
        if "deletionTimestamp" in pod["metadata"] and not (run.terminating or name in self.lost):
            run.terminating = True
            self._spawn(self._delete(run))

    def _start_pod(self, pod: Object) -> PodRun:
        number = nodes.names(self.shape).index(pod["spec"]["nodeName"]) + 1
        host_ip = nodes.address(self.shape, number)
        self.num_addresses += 1
        high, low = divmod(self.num_addresses, 250)
        own_ip = f"127.{self.shape.net}.{16 + high % 240}.{low + 1}"
        run = self.runs[pod["metadata"]["uid"]] = PodRun(
            self.api,
            pod,
            host_ip if pod["spec"].get("hostNetwork") else own_ip,
            host_ip,
            self.folder / "pods" / pod["metadata"]["uid"],
            self.folder / "hosts" / pod["metadata"]["namespace"],
            self.image,
            self.nodes_without_images,
        )
        # The downward API and DNS need the addresses before the first status report.
        pod.setdefault("status", {}).update({"podIP": run.ip, "hostIP": host_ip})
        self._write_hosts()
        run.start()
        return run

    async def _delete(self, run: PodRun) -> None:
        """Ends the processes of a deleted pod, then removes the object."""
        metadata = run.pod["metadata"]
        await run.stop(metadata.get("deletionGracePeriodSeconds", 30))
        await run.report()
        if run.silent:
            return
        where = path("pods", metadata["namespace"], metadata["name"])
        await self.api.delete(where, metadata["uid"], grace_s=0)

    async def _forget(self, run: PodRun, grace_s: float) -> None:
        run.silent = True
        await run.stop(grace_s)
        self.runs.pop(run.pod["metadata"]["uid"], None)
        self._write_hosts()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def lose_node(self, name: str, *, processes_live: bool = False) -> None:
        """The node stops reporting: it lost power or, with `processes_live`, only its network."""
        self.lost.add(name)
        for run in self._runs_on(name):
            run.silent = True
            if not processes_live:
                run.kill()
        where = path("nodes", "", name, "status")
        await self.api.patch(where, {"status": {"conditions": nodes.conditions(ready=False)}})

    async def restore_node(self, name: str) -> None:
        """The node reports again. Its lost containers restart if the pod's restartPolicy allows."""
        self.lost.discard(name)
        where = path("nodes", "", name, "status")
        await self.api.patch(where, {"status": {"conditions": nodes.conditions(ready=True)}})
        there = {pod["metadata"]["uid"]: pod for pod in self.pods.objects.values()}
        for run in self._runs_on(name):
            if run.pod["metadata"]["uid"] not in there:
                await self._forget(run, 0)
                continue
            run.silent = False
            if run.task is not None and run.task.cancelled():
                run.node_rebooted()
            await run.report()
        for pod in there.values():
            self._pod_changed("MODIFIED", pod)

    def _runs_on(self, name: str) -> list[PodRun]:
        return [run for run in self.runs.values() if run.pod["spec"]["nodeName"] == name]

    def run_of(self, key: str) -> PodRun | None:
        """The pod `namespace/name`, if its node is reachable."""
        for run in self.runs.values():
            if run.key == key and run.pod["spec"]["nodeName"] not in self.lost:
                return run
        return None

    async def close(self) -> None:
        """Ends all processes."""
        for run in self.runs.values():
            run.kill()
        for run in self.runs.values():
            await asyncio.gather(*(each.wait() for each in run.containers.values()))

    def _write_hosts(self) -> None:
        """Writes one file per namespace, which its pods mount as /etc/hosts: services and pods."""
        machine = Path("/etc/hosts").read_text()
        folder = self.folder / "hosts"
        folder.mkdir(parents=True, exist_ok=True)
        real = [run.pod for run in self.runs.values() if not is_processless(run.pod)]
        for namespace in {pod["metadata"]["namespace"] for pod in real}:
            text = "\n".join([machine, *self._host_lines(namespace), ""])
            with (folder / namespace).open("a+") as file:
                # The file is changed in place, because running pods have its inode mounted.
                file.seek(0)
                if file.read() != text:
                    file.truncate(0)
                    file.write(text)

    def _host_lines(self, namespace: str) -> list[str]:
        runs = [it for it in self.runs.values() if it.pod["metadata"]["namespace"] == namespace]
        alive = [run for run in runs if not run.ended and not run.silent]
        lines = []
        for run in alive:
            spec, name = run.pod["spec"], run.pod["metadata"]["name"]
            known = [spec.get("hostname", name)]
            if sub := spec.get("subdomain"):
                known += _qualified(f"{known[0]}.{sub}", namespace)
            lines.append(f"{run.ip} {' '.join(known)}")
        for (place, name), service in self.services.objects.items():
            selector = service["spec"].get("selector")
            if place == namespace and selector:
                lines += [
                    f"{run.ip} {' '.join(_qualified(name, namespace))}"
                    for run in alive
                    if selector.items() <= run.pod["metadata"].get("labels", {}).items()
                ]
        return lines

    async def _claim_changed(self, kind: str, claim: Object) -> None:
        """Binds the claim at once to a directory, which is deleted with the testbed."""
        metadata, spec = claim["metadata"], claim["spec"]
        if kind == "DELETED" or spec.get("volumeName") or metadata.get("deletionTimestamp"):
            return
        volume = f"pv-{metadata['uid']}"
        place = self.folder / "claims" / metadata["namespace"] / metadata["name"]
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)
        about = {key: metadata[key] for key in ("namespace", "name", "uid")}
        size, modes = spec["resources"]["requests"], spec["accessModes"]
        made = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": modes,
                "hostPath": {"path": str(place)},
                "claimRef": {"kind": "PersistentVolumeClaim", "apiVersion": "v1", **about},
                "storageClassName": spec.get("storageClassName", ""),
                "persistentVolumeReclaimPolicy": "Retain",
            },
        }
        await self.api.create(path("persistentvolumes"), made)
        where = path("persistentvolumeclaims", metadata["namespace"], metadata["name"])
        await self.api.patch(where, {"spec": {"volumeName": volume}})


def _qualified(name: str, namespace: str) -> list[str]:
    suffixes = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
    return [name + suffix for suffix in suffixes]
