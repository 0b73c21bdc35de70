"""A person at a terminal with a kubeconfig, and a job of theirs that nobody has to train."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.e2e.job import SPEC, Done, Ndctl, wait_for
from tests.kubernetes.testbed import REPOSITORY, KubeTestbed, TestbedError

LIMIT_S = 300.0
"""For what takes seconds on a quiet machine."""
PREFIX = "cluster.kubernetes."
SLEEPS = (
    "{spec: {terminationGracePeriodSeconds: 1, containers:"
    " [{name: pytorch, command: [sh, -c, 'sleep 600']}]}}"
)
"""A pod template in place of the agent's."""
NO_IMAGE = "registry.example.org/missing:1"
BASE = REPOSITORY / "manifests" / "base"


@dataclass(frozen=True)
class Person(Ndctl):
    kube: KubeTestbed
    namespace: str = "default"
    kubeconfig: Path | None = None
    """None: the cluster's admin."""
    trains: bool = False
    """The run directory is looked at where the pods have it."""

    @property
    def environ(self) -> dict[str, str]:
        kubeconfig = str(self.kubeconfig or self.kube.kubeconfig)
        path = self.kube.environ["PATH"]
        return {**super().environ, "PATH": path, "KUBECONFIG": kubeconfig}

    def at(self, namespace: str, kubeconfig: Path | None = None) -> Self:
        return dataclasses.replace(self, namespace=namespace, kubeconfig=kubeconfig)

    def words(self, **options: str) -> list[str]:
        """Of `submit` and `render`; keys of cluster.kubernetes, others with two underscores for
        each dot. Ranks are on CPUs, and nothing is left in the run directory."""
        volume = {"runs__host_path": str(self.kube.runs), "run_root": str(self.kube.runs)}
        cheap = {"image": "ndctl:1", "gpu_resource": "null", "shm": "null", "cpu": "100m"}
        found = {**volume, **cheap, "namespace": self.namespace, **options}
        found = {key: value for key, value in found.items() if value}
        sets = [f"--set={_path(key)}={value}" for key, value in found.items()]
        return [str(SPEC), "--backend=kubernetes", *sets]

    def submit(self, *words: str, **options: str) -> Done:
        return self("submit", *self.words(**options), *words)

    def submitted(self, *words: str, **options: str) -> None:
        done = self.submit(*words, **options)
        assert done.code == 0, done.out + done.err

    def shown(self) -> str:
        """What `ndctl status` says first."""
        done = self("status", "e2e", "--backend=kubernetes", "-n", self.namespace)
        assert done.code == 0, done.err
        return done.out.partition("\n")[0]

    def wait_until_shown(self, *words: str, limit: float = 60) -> str:
        said = [""]

        def shown() -> bool:
            said[0] = self.shown()
            return all(word in said[0] for word in words)

        try:
            wait_for(shown, f"{words}", limit)
        except AssertionError as exc:
            raise AssertionError(f"{exc}; shown is: {said[0]}") from exc
        return said[0]

    def render(self, **options: str) -> str:
        done = self("render", *self.words(**options))
        assert done.code == 0, done.err
        return done.out

    @property
    def run_dir(self) -> Path:
        return self.kube.runs / "e2e" if self.trains else super().run_dir

    def wait_until(self, step: int) -> None:
        """Or until the end, which a failure has come to."""
        self._wait(lambda: self.steps() and self.metrics()[-1]["step"] >= step, f"step {step}")

    def wait_until_attempt(self, number: int) -> None:
        """It has trained a step."""
        trained = lambda: self.steps() and self.metrics()[-1]["attempt"] >= number  # noqa: E731
        self._wait(trained, f"attempt {number}")

    def _wait(self, condition: Callable[[], Any], what: str) -> None:
        def holds() -> bool:
            if condition():
                return True
            assert not self.has_ended(), f"it ended before {what}\n{self.story()}"
            return False

        try:
            wait_for(holds, what, LIMIT_S)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.story()}") from exc

    def wait_for_end(self, state: str = "SUCCEEDED") -> None:
        try:
            wait_for(self.has_ended, "the end", LIMIT_S)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.story()}") from exc
        (*_, end) = (one for one in self.actions() if one["kind"] == "EndJob")
        assert end["state"] == state, self.story()

    def story(self) -> str:
        """For whoever has to find out why a test failed."""
        told = self("events", "e2e", f"--run-root={self.kube.runs}")
        logs = sorted((self.run_dir / "logs").glob("agent-*.log"))
        ends = [f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs]
        pods = self.kube.kubectl("get", "pods", "-o", "wide", "-n", self.namespace)
        return "\n".join([told.out, told.err, pods, *ends])

    def attempts(self) -> int:
        return len([one for one in self.actions() if one["kind"] == "StartAttempt"])

    def hosts(self) -> list[str]:
        """Of the newest attempt."""
        (*_, start) = (one for one in self.actions() if one["kind"] == "StartAttempt")
        found: list[str] = start["hosts"]
        return found

    def leaders(self) -> list[str]:
        return [event["host"] for event in self.events("LeaderStarted")]

    def incidents(self) -> list[tuple[str, str | None]]:
        done = self("status", "e2e", f"--run-root={self.kube.runs}", "--json")
        assert done.code == 0, done.err
        return [(one["kind"], one["culprit"]["host"]) for one in json.loads(done.out)["incidents"]]

    def uids(self) -> dict[str, str]:
        found = self.kube.objects("pods", self.namespace, "ndctl.dev/job=e2e")
        return {one["metadata"]["name"]: one["metadata"]["uid"] for one in found}

    def nodes(self) -> dict[str, str]:
        """Node -> pod."""
        found = self.kube.objects("pods", self.namespace, "ndctl.dev/job=e2e")
        return {one["spec"]["nodeName"]: one["metadata"]["name"] for one in found}

    def pods(self) -> dict[str, str]:
        return self.kube.phases("ndctl.dev/job=e2e", self.namespace)

    def job(self) -> dict[str, Any] | None:
        try:
            return self.kube.get("pytorchjobs", "e2e", self.namespace)
        except TestbedError:
            return None


def _path(key: str) -> str:
    key = key.replace("__", ".")
    return (
        key
        if key.startswith(("cluster.", "train.", "resilience.", "checkpoint."))
        else PREFIX + key
    )


def account(kube: KubeTestbed, namespace: str = "default") -> None:
    """Of the job's pods, without any right: they are not to do anything."""
    labels = {"app.kubernetes.io/part-of": "ndctl"}
    metadata = {"name": "ndctl-job", "labels": labels}
    made = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    kube.apply(made, namespace=namespace)


def rights(kube: KubeTestbed, namespace: str = "default") -> None:
    """What manifests/base gives, in another namespace."""
    text = kube.kubectl("kustomize", str(BASE)).replace(
        "namespace: ndctl\n", f"namespace: {namespace}\n"
    )
    file = kube.folder / f"base-{namespace}.yaml"
    file.write_text(text)
    kube.kubectl("apply", "-f", str(file))


def advised(text: str) -> list[list[str]]:
    """The kubectl commands that an error says to type, each as its words."""
    lines = (line.strip() for line in text.splitlines())
    return [line.split() for line in lines if line.startswith("kubectl ")]
