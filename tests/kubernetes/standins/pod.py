"""One pod on a fake node: mounts its volumes, runs its containers and reports their status."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.standins import volumes
from tests.kubernetes.standins.api import Api, ApiError, Object, path
from tests.kubernetes.standins.containers import Container, Mount, expand_variables
from tests.kubernetes.standins.nodes import now
from tests.kubernetes.standins.processless import ProcesslessContainer, is_processless

BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
"""Delay before each restart of a container; a real kubelet starts with 10 s."""
RETRY_S = 0.5
KUBELET_CONDITIONS = ("Initialized", "Ready", "ContainersReady")
"""Conditions that a kubelet sets."""


@dataclass
class PodRun:
    api: Api
    pod: Object
    ip: str
    host_ip: str
    folder: Path
    hosts: Path
    """Its /etc/hosts, in place of the cluster's DNS."""
    image: Mapping[str, str]
    """Environment variables that every image sets."""
    nodes_without_images: Collection[str] = ()
    """Nodes that cannot pull images at present."""
    silent: bool = False
    """The node is lost, so nothing is reported."""
    terminating: bool = False
    ready: bool = False
    reason: str = ""
    message: str = ""
    """Reason and message of the whole pod, for example Evicted."""
    states: dict[str, Object] = field(default_factory=dict)
    """Container to its state, lastState and restartCount, as in the pod's status."""
    containers: dict[str, Container | ProcesslessContainer] = field(default_factory=dict)
    oom_killed: set[str] = field(default_factory=set)
    task: "asyncio.Task[None] | None" = None

    @property
    def key(self) -> str:
        return f"{self.pod['metadata']['namespace']}/{self.pod['metadata']['name']}"

    @property
    def ended(self) -> bool:
        return self.phase() in ("Succeeded", "Failed")

    def start(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        specs = self.pod["spec"]["containers"]
        inits = self.pod["spec"].get("initContainers", [])
        for spec in [*inits, *specs]:
            started = self.states.get(spec["name"], {}).get("restartCount", 0)
            self._set_waiting(spec, "ContainerCreating", "", restarts=started)
        await self.report()
        for spec in inits:
            await self._run_container(spec, restart=self._policy() != "Never")
            if self._exit_code(spec) != 0:
                await self.report()
                return
        self.ready = True
        always = {"Always": True, "OnFailure": None, "Never": False}[self._policy()]
        await asyncio.gather(*(self._run_container(spec, restart=always) for spec in specs))
        await self.report()

    async def _run_container(self, spec: Object, restart: bool | None) -> None:
        """`restart` says whether it restarts: always, never, or (None) only after a failure."""
        while True:
            code = await self._run_once(spec)
            if self.terminating or restart is False or (restart is None and code == 0):
                return
            if spec not in self.pod["spec"]["containers"] and code == 0:
                return
            status = self.states[spec["name"]]
            status["restartCount"] += 1
            pause = BACKOFF_S[min(status["restartCount"], len(BACKOFF_S)) - 1]
            status["lastState"] = status["state"]
            text = f"back-off {pause:.0f}s restarting failed container={spec['name']}"
            status["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": text}}
            await self.report()
            await self.event("Warning", "BackOff", "Back-off restarting failed container")
            await asyncio.sleep(pause)

    async def _run_once(self, spec: Object) -> int:
        container = await self._prepare_container(spec)
        began, status = now(), self.states[spec["name"]]
        try:
            await container.start()
        except FileNotFoundError as exc:
            text = f'exec: "{exc}": executable file not found in $PATH: unknown'
            return await self._set_terminated(spec, 128, "StartError", text, began)
        self.containers[spec["name"]] = container
        status["state"] = {"running": {"startedAt": began}}
        await self.report()
        await self.event("Normal", "Started", f"Started container {spec['name']}")
        code = await container.wait()
        oom_killed = spec["name"] in self.oom_killed
        self.oom_killed.discard(spec["name"])
        reason = "OOMKilled" if oom_killed else "Completed" if code == 0 else "Error"
        return await self._set_terminated(spec, code, reason, self._message(spec, code), began)

    def _message(self, spec: Object, code: int) -> str:
        """The end of its log, if its terminationMessagePolicy asks for that."""
        if code == 0 or spec.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            return ""
        lines = self.log(spec["name"]).read_bytes().splitlines(keepends=True)[-80:]
        return b"".join(lines)[-2048:].decode(errors="replace")

    async def _set_terminated(
        self, spec: Object, code: int, reason: str, message: str, began: str
    ) -> int:
        ended = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}
        text = {"message": message} if message else {}
        self.states[spec["name"]]["state"] = {"terminated": {**ended, **text}}
        if not self.ended:
            await self.report()
        return code

    async def _prepare_container(self, spec: Object) -> Container | ProcesslessContainer:
        """The container with its volumes and environment. While its image, a volume or a variable
        is missing, it reports that and waits."""
        if is_processless(self.pod):
            return ProcesslessContainer(self.image, self._log(spec["name"], 0))
        while True:
            while self._lacks_image(spec):
                await self._report_missing_image(spec)
            try:
                mounts = await volumes.mounts(self.api, self.pod, spec, self.folder / "volumes")
                environ = await volumes.environ(self.api, self.pod, spec, self.image)
            except volumes.MissingObject as exc:
                waits = "ContainerCreating" if exc.reason == "FailedMount" else exc.reason
                self._set_waiting(spec, waits, "" if waits != exc.reason else str(exc))
                await self.report()
                await self.event("Warning", exc.reason, str(exc))
                await asyncio.sleep(RETRY_S)
                continue
            hostname = self.pod["spec"].get("hostname", self.pod["metadata"]["name"])
            environ["HOSTNAME"] = hostname
            argv = [*spec.get("command", ()), *spec.get("args", ())] or ["no-entrypoint"]
            return Container(
                hostname,
                [expand_variables(word, environ) for word in argv],
                environ,
                spec.get("workingDir", "/"),
                [Mount(self.hosts, "/etc/hosts", read_only=True), *mounts],
                self._log(spec["name"], self.states[spec["name"]]["restartCount"]),
            )

    def _lacks_image(self, spec: Object) -> bool:
        """No registry has an image named `missing`."""
        named = spec["image"].rpartition("/")[2].partition(":")[0]
        return named == "missing" or self.pod["spec"]["nodeName"] in self.nodes_without_images

    async def _report_missing_image(self, spec: Object) -> None:
        """Reports a failed pull and waits until the image can be pulled."""
        image = spec["image"]
        text = f'failed to pull and unpack image "{image}": not found'
        self._set_waiting(spec, "ErrImagePull", f"rpc error: code = NotFound desc = {text}")
        await self.report()
        await self.event("Warning", "Failed", f'Failed to pull image "{image}": {text}')
        await asyncio.sleep(RETRY_S)
        self._set_waiting(spec, "ImagePullBackOff", f'Back-off pulling image "{image}"')
        await self.report()
        while self._lacks_image(spec):
            await asyncio.sleep(RETRY_S)

    def log(self, container: str, *, previous: bool = False) -> Path:
        count = self.states.get(container, {}).get("restartCount", 0)
        return self._log(container, count - 1 if previous else count)

    def _log(self, container: str, restarts: int) -> Path:
        place = self.folder / "logs" / container / f"{restarts}.log"
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM to its containers, and SIGKILL after the grace period."""
        self.terminating = True
        running = [each for each in self.containers.values() if each.pids()]
        await asyncio.gather(*(each.stop(grace_s) for each in running))
        if self.task is not None:
            if not running:
                self.task.cancel()
            await asyncio.wait([self.task])

    def kill(self) -> None:
        """Kills all containers at once and reports nothing."""
        self.silent = True
        if self.task is not None:
            self.task.cancel()
        for container in self.containers.values():
            container.signal(9)

    def node_rebooted(self) -> None:
        """Its node is back after a power loss: its running containers have ended unreported."""
        for spec in self.pod["spec"]["containers"]:
            status = self.states.get(spec["name"])
            if status is not None and _is_running(status):
                ended = {"exitCode": 137, "reason": "Error", "finishedAt": now()}
                status["state"] = {"terminated": ended}
        if self._policy() != "Never" and not self.terminating:
            for status in self.states.values():
                status["restartCount"] += 1
                status["lastState"] = status["state"]
            self.start()

    async def evict(self, message: str) -> None:
        """Ends the pod like a kubelet under memory pressure."""
        self.reason, self.message = "Evicted", message
        await self.event("Warning", "Evicted", message)
        await self.stop(0)
        await self.report()

    def phase(self) -> str:
        if self.reason == "Evicted":
            return "Failed"
        codes = [self._exit_code(spec) for spec in self.pod["spec"]["containers"]]
        if not self.ready:
            inits = [self._exit_code(spec) for spec in self.pod["spec"].get("initContainers", [])]
            return "Failed" if self._policy() == "Never" and any(inits) else "Pending"
        if None in codes:
            started = [it for it in self.states.values() if it["restartCount"] or _is_running(it)]
            return "Running" if started else "Pending"
        if self._policy() == "Never" or self.terminating or not any(codes):
            return "Running" if self._always_restarts() else "Failed" if any(codes) else "Succeeded"
        return "Running"

    def _always_restarts(self) -> bool:
        return self._policy() == "Always" and not self.terminating

    def _policy(self) -> str:
        return str(self.pod["spec"].get("restartPolicy", "Always"))

    def _exit_code(self, spec: Object) -> int | None:
        state = self.states.get(spec["name"], {}).get("state", {})
        return state["terminated"]["exitCode"] if "terminated" in state else None

    def _set_waiting(self, spec: Object, reason: str, message: str, restarts: int = 0) -> None:
        waits = {"reason": reason, **({"message": message} if message else {})}
        status = self.states.setdefault(spec["name"], {"restartCount": restarts, "lastState": {}})
        status["state"] = {"waiting": waits}

    async def report(self) -> None:
        if self.silent:
            return
        metadata = self.pod["metadata"]
        where = path("pods", metadata["namespace"], metadata["name"], "status")
        await self.api.patch(where, {"metadata": {"uid": metadata["uid"]}, "status": self.status()})

    def status(self) -> Object:
        phase, spec = self.phase(), self.pod["spec"]
        statuses = {it["name"]: self._container_status(it) for it in spec["containers"]}
        inits = [self._container_status(it) for it in spec.get("initContainers", [])]
        up = phase == "Running" and all(it["ready"] for it in statuses.values())
        holds = {"Initialized": self.ready, "Ready": up, "ContainersReady": up}
        before = self.pod.get("status", {})
        status = {
            "phase": phase,
            "hostIP": self.host_ip,
            "podIP": self.ip,
            "podIPs": [{"ip": self.ip}],
            "startTime": before.get("startTime") or now(),
            "containerStatuses": list(statuses.values()),
            "conditions": [
                *(
                    it
                    for it in before.get("conditions", ())
                    if it["type"] not in KUBELET_CONDITIONS
                ),
                *(_condition(kind, holds[kind], phase) for kind in KUBELET_CONDITIONS),
            ],
        }
        status |= {"initContainerStatuses": inits} if inits else {}
        return status | ({"reason": self.reason, "message": self.message} if self.reason else {})

    def _container_status(self, spec: Object) -> Object:
        status = self.states.get(spec["name"], {"restartCount": 0, "state": {}, "lastState": {}})
        named = {"name": spec["name"], "image": spec["image"], "imageID": spec["image"]}
        up = _is_running(status)
        ids = f"process://{self.pod['metadata']['uid']}/{spec['name']}/{status['restartCount']}"
        return {**named, "containerID": ids, "ready": up, "started": up, **status}

    async def event(self, kind: str, reason: str, message: str) -> None:
        if not self.silent:
            await post_event(self.api, self.pod, kind, reason, message)


async def post_event(api: Api, thing: Object, kind: str, reason: str, message: str) -> None:
    metadata = thing["metadata"]
    namespace = metadata.get("namespace", "default")
    about = {"kind": thing.get("kind", "Pod"), "apiVersion": thing.get("apiVersion", "v1")}
    about |= {key: metadata[key] for key in ("name", "namespace", "uid") if key in metadata}
    event = {
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": namespace},
        "involvedObject": about,
        "type": kind,
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": now(),
        "lastTimestamp": now(),
        "source": {"component": "kubelet", "host": thing["spec"]["nodeName"]}
        if thing.get("kind", "Pod") == "Pod"
        else {"component": "testbed"},
    }
    with contextlib.suppress(ApiError):  # The namespace may be terminating.
        await api.create(path("events", namespace), event)


def _is_running(status: Object) -> bool:
    return "running" in status["state"]


def _condition(kind: str, holds: bool, phase: str) -> Object:
    output: Object = {"type": kind, "status": str(holds), "lastTransitionTime": now()}
    if not holds:
        output["reason"] = "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"
    return output
