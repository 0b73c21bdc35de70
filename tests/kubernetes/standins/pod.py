"""One pod on a fake node: its containers from the first volume to the last exit code, and what is
reported of them."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.standins import volumes
from tests.kubernetes.standins.api import Api, ApiError, Object, path
from tests.kubernetes.standins.containers import Container, Mount, expanded
from tests.kubernetes.standins.nodes import now
from tests.kubernetes.standins.processless import Pretended, is_pretended

BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
"""Before a container's restarts; a real kubelet begins with 10 s."""
RETRY_S = 0.5
OURS = ("Initialized", "Ready", "ContainersReady")
"""Conditions that a kubelet sets."""


@dataclass
class PodRun:
    api: Api
    pod: Object
    ip: str
    host_ip: str
    folder: Path
    hosts: Path
    """Its /etc/hosts, which plays the cluster's DNS."""
    image: Mapping[str, str]
    """The environment that every image brings along."""
    imageless: Collection[str] = ()
    """Nodes that can pull none, at present."""
    silent: bool = False
    """Its node is lost: nothing is reported."""
    leaving: bool = False
    ready: bool = False
    reason: str = ""
    message: str = ""
    """Of the pod as a whole, as for Evicted."""
    states: dict[str, Object] = field(default_factory=dict)
    """Of each container, as in the status: state, lastState, restartCount."""
    containers: dict[str, Container | Pretended] = field(default_factory=dict)
    oom: set[str] = field(default_factory=set)
    task: "asyncio.Task[None] | None" = None

    @property
    def key(self) -> str:
        return f"{self.pod['metadata']['namespace']}/{self.pod['metadata']['name']}"

    @property
    def ended(self) -> bool:
        return self.phase() in ("Succeeded", "Failed")

    def begin(self) -> None:
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        specs = self.pod["spec"]["containers"]
        inits = self.pod["spec"].get("initContainers", [])
        for spec in [*inits, *specs]:
            started = self.states.get(spec["name"], {}).get("restartCount", 0)
            self._waiting(spec, "ContainerCreating", "", restarts=started)
        await self.report()
        for spec in inits:
            await self._run_container(spec, again=self._policy() != "Never")
            if self._code(spec) != 0:
                await self.report()
                return
        self.ready = True
        always = {"Always": True, "OnFailure": None, "Never": False}[self._policy()]
        await asyncio.gather(*(self._run_container(spec, again=always) for spec in specs))
        await self.report()

    async def _run_container(self, spec: Object, again: bool | None) -> None:
        """`again` None: only after a failure."""
        while True:
            code = await self._once(spec)
            if self.leaving or again is False or (again is None and code == 0):
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

    async def _once(self, spec: Object) -> int:
        container = await self._container(spec)
        began, status = now(), self.states[spec["name"]]
        try:
            await container.start()
        except FileNotFoundError as exc:
            text = f'exec: "{exc}": executable file not found in $PATH: unknown'
            return await self._terminated(spec, 128, "StartError", text, began)
        self.containers[spec["name"]] = container
        status["state"] = {"running": {"startedAt": began}}
        await self.report()
        await self.event("Normal", "Started", f"Started container {spec['name']}")
        code = await container.wait()
        oom = spec["name"] in self.oom
        self.oom.discard(spec["name"])
        reason = "OOMKilled" if oom else "Completed" if code == 0 else "Error"
        return await self._terminated(spec, code, reason, self._message(spec, code), began)

    def _message(self, spec: Object, code: int) -> str:
        """The end of its log, where it asks for that."""
        if code == 0 or spec.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            return ""
        lines = self.log(spec["name"]).read_bytes().splitlines(keepends=True)[-80:]
        return b"".join(lines)[-2048:].decode(errors="replace")

    async def _terminated(
        self, spec: Object, code: int, reason: str, message: str, began: str
    ) -> int:
        ended = {"exitCode": code, "reason": reason, "startedAt": began, "finishedAt": now()}
        text = {"message": message} if message else {}
        self.states[spec["name"]]["state"] = {"terminated": {**ended, **text}}
        if not self.ended:
            await self.report()
        return code

    async def _container(self, spec: Object) -> Container | Pretended:
        """With all that it needs; waits, and says so, until that is there."""
        if is_pretended(self.pod):
            return Pretended(self.image, self._log(spec["name"], 0))
        while True:
            while self._lacks_image(spec):
                await self._no_image(spec)
            try:
                mounts = await volumes.mounts(self.api, self.pod, spec, self.folder / "volumes")
                environ = await volumes.environ(self.api, self.pod, spec, self.image)
            except volumes.NotYet as exc:
                waits = "ContainerCreating" if exc.reason == "FailedMount" else exc.reason
                self._waiting(spec, waits, "" if waits != exc.reason else str(exc))
                await self.report()
                await self.event("Warning", exc.reason, str(exc))
                await asyncio.sleep(RETRY_S)
                continue
            hostname = self.pod["spec"].get("hostname", self.pod["metadata"]["name"])
            environ["HOSTNAME"] = hostname
            argv = [*spec.get("command", ()), *spec.get("args", ())] or ["no-entrypoint"]
            return Container(
                hostname,
                [expanded(word, environ) for word in argv],
                environ,
                spec.get("workingDir", "/"),
                [Mount(self.hosts, "/etc/hosts", read_only=True), *mounts],
                self._log(spec["name"], self.states[spec["name"]]["restartCount"]),
            )

    def _lacks_image(self, spec: Object) -> bool:
        """Nobody ever pushes the one that is called `missing`."""
        named = spec["image"].rpartition("/")[2].partition(":")[0]
        return named == "missing" or self.pod["spec"]["nodeName"] in self.imageless

    async def _no_image(self, spec: Object) -> None:
        """One that fails, and the wait before the next."""
        image = spec["image"]
        text = f'failed to pull and unpack image "{image}": not found'
        self._waiting(spec, "ErrImagePull", f"rpc error: code = NotFound desc = {text}")
        await self.report()
        await self.event("Warning", "Failed", f'Failed to pull image "{image}": {text}')
        await asyncio.sleep(RETRY_S)
        self._waiting(spec, "ImagePullBackOff", f'Back-off pulling image "{image}"')
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
        """Its containers get SIGTERM, and what is left of them SIGKILL."""
        self.leaving = True
        running = [each for each in self.containers.values() if each.pids()]
        await asyncio.gather(*(each.stop(grace_s) for each in running))
        if self.task is not None:
            if not running:
                self.task.cancel()
            await asyncio.wait([self.task])

    def kill(self) -> None:
        """At once, with nothing said."""
        self.silent = True
        if self.task is not None:
            self.task.cancel()
        for container in self.containers.values():
            container.signal(9)

    def rebooted(self) -> None:
        """Its node is back; what ran there ended without a word."""
        for spec in self.pod["spec"]["containers"]:
            status = self.states.get(spec["name"])
            if status is not None and _up(status):
                ended = {"exitCode": 137, "reason": "Error", "finishedAt": now()}
                status["state"] = {"terminated": ended}
        if self._policy() != "Never" and not self.leaving:
            for status in self.states.values():
                status["restartCount"] += 1
                status["lastState"] = status["state"]
            self.begin()

    async def evict(self, message: str) -> None:
        """As a kubelet does under memory pressure."""
        self.reason, self.message = "Evicted", message
        await self.event("Warning", "Evicted", message)
        await self.stop(0)
        await self.report()

    def phase(self) -> str:
        if self.reason == "Evicted":
            return "Failed"
        codes = [self._code(spec) for spec in self.pod["spec"]["containers"]]
        if not self.ready:
            inits = [self._code(spec) for spec in self.pod["spec"].get("initContainers", [])]
            return "Failed" if self._policy() == "Never" and any(inits) else "Pending"
        if None in codes:
            begun = [it for it in self.states.values() if it["restartCount"] or _up(it)]
            return "Running" if begun else "Pending"
        if self._policy() == "Never" or self.leaving or not any(codes):
            return "Running" if self._restarts() else "Failed" if any(codes) else "Succeeded"
        return "Running"

    def _restarts(self) -> bool:
        return self._policy() == "Always" and not self.leaving

    def _policy(self) -> str:
        return str(self.pod["spec"].get("restartPolicy", "Always"))

    def _code(self, spec: Object) -> int | None:
        state = self.states.get(spec["name"], {}).get("state", {})
        return state["terminated"]["exitCode"] if "terminated" in state else None

    def _waiting(self, spec: Object, reason: str, message: str, restarts: int = 0) -> None:
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
                *(it for it in before.get("conditions", ()) if it["type"] not in OURS),
                *(_condition(kind, holds[kind], phase) for kind in OURS),
            ],
        }
        status |= {"initContainerStatuses": inits} if inits else {}
        return status | ({"reason": self.reason, "message": self.message} if self.reason else {})

    def _container_status(self, spec: Object) -> Object:
        status = self.states.get(spec["name"], {"restartCount": 0, "state": {}, "lastState": {}})
        named = {"name": spec["name"], "image": spec["image"], "imageID": spec["image"]}
        up = _up(status)
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
    with contextlib.suppress(ApiError):  # its namespace may be going away
        await api.create(path("events", namespace), event)


def _up(status: Object) -> bool:
    return "running" in status["state"]


def _condition(kind: str, holds: bool, phase: str) -> Object:
    said: Object = {"type": kind, "status": str(holds), "lastTransitionTime": now()}
    if not holds:
        said["reason"] = "PodCompleted" if phase == "Succeeded" else "ContainersNotReady"
    return said
