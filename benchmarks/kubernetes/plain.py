"""What the same faults do to a PyTorchJob of plain torchrun, beside `benchmarks.kubernetes.faults`.

    python -m benchmarks.kubernetes.plain [FAULT...]

The same trainer, mesh, nodes and stand-ins, without ndctl: the kubelet restarts the container of
each pod in which torchrun fails (`OnFailure`), and the ranks resume from the newest checkpoint.
Seconds are counted from the fault to the first step after it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.jobs.local import SPEC, metrics_of, redone, sets
from benchmarks.measure.timing import machine
from tests.e2e.job import processes_of, wait_for
from tests.kubernetes.standins.nodes import Shape
from tests.kubernetes.testbed import KubeTestbed, running_testbed

NAME, NAMESPACE = "plain", "default"
LIMIT_S = 300.0
DYING_S = 1.0
"""Steps that end within this time of a fault were begun before it."""
OPTIONS = sets(
    cluster__hosts=2,
    cluster__gpus_per_host=2,
    data__sequence_length=128,
    train__steps=100_000,
    checkpoint__every_steps=10,
)


@dataclass(frozen=True)
class Plain:
    testbed: KubeTestbed
    out: Path

    def pod(self, index: int) -> str:
        return f"{NAME}-worker-0" if index else f"{NAME}-master-0"

    def kill(self, index: int, command: str) -> None:
        """Kill the first process of a pod whose command line has these words."""
        for pid in self.testbed.pids(self.pod(index), NAMESPACE):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if command in line:
                os.kill(pid, signal.SIGKILL)
                return
        raise RuntimeError(f"pod {index} has no process with {command!r}")

    def delete(self, index: int) -> None:
        self.testbed.kubectl("delete", "pod", self.pod(index), "--wait=false")

    def lose(self, index: int) -> None:
        pod = self.testbed.get("pods", self.pod(index), NAMESPACE)
        assert pod is not None
        self.testbed.lose_node(pod["spec"]["nodeName"])


FAULTS: dict[str, tuple[str, Callable[[Plain], None]]] = {
    "rank": ("kill -9 of a rank", lambda job: job.kill(1, "-u -m trainer")),
    "agent": ("kill -9 of a pod's first process", lambda job: job.kill(1, "torchrun")),
    "pod": ("a pod is deleted", lambda job: job.delete(1)),
    "other": ("a node is lost", lambda job: job.lose(1)),
    "first": ("the first node is lost", lambda job: job.lose(0)),
}


def main(names: list[str]) -> None:
    print(machine())
    with running_testbed(Shape(nodes=5)) as testbed:
        print(f"{testbed.version}, load {os.getloadavg()[0]:.1f} before")
        print(
            "| fault | s to the first new step | steps repeated | same losses |\n|---|---|---|---|"
        )
        for name in names or FAULTS:
            what, fault = FAULTS[name]
            testbed.restore()
            print(f"| {what} | {' | '.join(suffered(testbed, fault))} |", flush=True)


def suffered(testbed: KubeTestbed, fault: Callable[[Plain], None]) -> list[str]:
    with plain_job(testbed) as job:
        wait_for(lambda: len(metrics_of(job.out)) >= 15, "a checkpoint", LIMIT_S)
        begun = time.perf_counter()
        fault(job)
        time.sleep(DYING_S)
        known = len(metrics_of(job.out))
        try:
            wait_for(lambda: len(metrics_of(job.out)) > known, "", LIMIT_S)
        except AssertionError:
            return [f"none in {LIMIT_S:.0f}", "", ""]
        seconds = time.perf_counter() - begun
        # The first steps after a restart are the repeated ones.
        wait_for(lambda: len(metrics_of(job.out)) > known + 12, "more steps", LIMIT_S)
        twice, alike = redone(metrics_of(job.out))
        return [f"{seconds:.1f}", str(twice), "yes" if alike else "NO"]


@contextmanager
def plain_job(testbed: KubeTestbed) -> Iterator[Plain]:
    out = testbed.runs / f"{NAME}-{time.time_ns()}"
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({**trainer_config(), "out": str(out)}))
    (out / "job.json").write_text(json.dumps(manifest(out)))
    testbed.kubectl("apply", "-f", str(out / "job.json"))
    try:
        yield Plain(testbed, out)
    finally:
        testbed.restore()
        wait_for(lambda: not processes_of(out), "the end of the pods", LIMIT_S)


def trainer_config() -> Any:
    words = (sys.executable, "-m", "orchestrator", "submit", str(SPEC), "--dry-run", *OPTIONS)
    shown = subprocess.run(words, check=True, timeout=60, capture_output=True, text=True).stdout
    config, _ = json.JSONDecoder().raw_decode(shown, shown.index("{"))
    return config


def manifest(out: Path) -> dict[str, Any]:
    """As in the documentation of Kubeflow: torchrun reads the PET_ variables of the operator."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    container = {
        "name": "pytorch",
        "image": "ndctl:1",
        "command": [torchrun, "-m", "trainer", str(out / "config.json")],
        # Without this, ranks that torchrun restarts on gloo read addresses of the dead ones.
        "env": [{"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"}],
        "volumeMounts": [{"name": "runs", "mountPath": str(out)}],
    }
    pod = {"containers": [container], "volumes": [{"name": "runs", "hostPath": {"path": str(out)}}]}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "nprocPerNode": "2",
            "pytorchReplicaSpecs": {
                role: {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": pod}}
                for role in ("Master", "Worker")
            },
        },
    }


if __name__ == "__main__":
    main(sys.argv[1:])
