"""A person at a terminal with a kubeconfig. The pods of their job need not train."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.e2e.job import SPEC, CommandResult, Ndctl, wait_for
from tests.kubernetes.testbed import KubeTestbed
from tests.testbeds import TestbedError

PREFIX = "cluster.kubernetes."
SLEEPS = (
    "{spec: {terminationGracePeriodSeconds: 1, containers:"
    " [{name: pytorch, command: [sh, -c, 'sleep 600']}]}}"
)
"""A pod template whose pods sleep instead of running an agent."""
NO_IMAGE = "registry.example.org/missing:1"


@dataclass(frozen=True)
class Person(Ndctl):
    kube: KubeTestbed
    namespace: str = "default"
    kubeconfig: Path | None = None
    """None means the cluster's admin."""

    @property
    def environ(self) -> dict[str, str]:
        kubeconfig = str(self.kubeconfig or self.kube.kubeconfig)
        found = super().environ
        # Two people have two lists of jobs, even if one account runs the test.
        state = f"{found['XDG_STATE_HOME']}/{self.run_root.name}"
        path = self.kube.environ["PATH"]
        return {**found, "PATH": path, "KUBECONFIG": kubeconfig, "XDG_STATE_HOME": state}

    def at(self, namespace: str, kubeconfig: Path | None = None) -> Self:
        return dataclasses.replace(self, namespace=namespace, kubeconfig=kubeconfig)

    def words(self, **options: str) -> list[str]:
        """Arguments of `submit` and `render`. `options` are keys of cluster.kubernetes, or full
        keys with two underscores for each dot. Ranks use CPUs."""
        volume = {"runs__host_path": str(self.kube.runs), "run_root": str(self.kube.runs)}
        cheap = {"image": "ndctl:1", "gpu_resource": "null", "shm": "null", "cpu": "100m"}
        site = {"namespace": self.namespace, "service_account": "ndctl-job"}
        found = {**volume, **cheap, **site, **options}
        found = {key: value for key, value in found.items() if value}
        sets = [f"--set={_path(key)}={value}" for key, value in found.items()]
        return [str(SPEC), "--backend=kubernetes", *sets]

    def submit(self, *words: str, **options: str) -> CommandResult:
        return self("submit", *self.words(**options), *words)

    def submit_successfully(self, *words: str, **options: str) -> None:
        done = self.submit(*words, **options)
        assert done.code == 0, done.out + done.err

    def first_status_line(self) -> str:
        """The first line of `ndctl status`."""
        done = self("status", "e2e", "--backend=kubernetes", "-n", self.namespace)
        assert done.code == 0, done.err
        return done.out.partition("\n")[0]

    def wait_for_status(self, *words: str, limit: float = 200) -> str:
        output = [""]

        def shown() -> bool:
            output[0] = self.first_status_line()
            return all(word in output[0] for word in words)

        try:
            wait_for(shown, f"{words}", limit)
        except AssertionError as exc:
            raise AssertionError(f"{exc}; ndctl status shows: {output[0]}") from exc
        return output[0]

    def render(self, **options: str) -> str:
        done = self("render", *self.words(**options))
        assert done.code == 0, done.err
        return done.out

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
    """Creates the ServiceAccount of the job's pods, without any right."""
    labels = {"app.kubernetes.io/part-of": "ndctl"}
    metadata = {"name": "ndctl-job", "labels": labels}
    made = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}
    kube.apply(made, namespace=namespace)


def advised(text: str) -> list[list[str]]:
    """The kubectl commands that an error message suggests, split into words."""
    lines = (line.strip() for line in text.splitlines())
    return [line.split() for line in lines if line.startswith("kubectl ")]
