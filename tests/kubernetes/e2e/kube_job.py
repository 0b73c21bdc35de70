"""The job of `tests/e2e` on a real Kubernetes API server, through the command line."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from orchestrator.backends.kubernetes.controller.controller_client import LEASE
from tests.e2e.job import TP, CommandResult, Ndctl, processes_of, submit_args, wait_for
from tests.kubernetes.testbed import REPOSITORY, KubeTestbed, Object
from tests.testbeds import TestbedError
from trainer.data.ledger_check import first_mistake, replay

JOB = "e2e"
NAMESPACE = "ndctl"
"""The namespace of manifests/base."""
CONTROLLER_ACCOUNT = "manifests/controller/account.yaml"
LIMIT_S = 600.0
"""Time limit for steps that take seconds on an idle machine."""
TAIL = 60
"""Number of lines of each pod's log in a failure report."""
AGENT_TIMEOUT_S = "30"
"""The API server takes much CPU, so an agent may be silent for seconds."""
STEPS = range(1, 25)
"""Steps that the job trains."""
LONG = {"train__steps": "5000", "checkpoint__every_steps": "5000"}
"""A job that runs until it is stopped, and that writes checkpoints only on request."""
RESOURCES = {
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainjob": "trainjobs.trainer.kubeflow.org",
}
Options = Mapping[str, str]


@dataclass(frozen=True)
class KubeNdctl(Ndctl):
    """`ndctl` on a machine outside the cluster. Pods mount the run root at the same path, so that
    their processes can be found by it."""

    testbed: KubeTestbed
    kind: str = "pytorchjob"
    namespace: str = NAMESPACE
    extra_environ: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""

    def from_other_machine(self, run_root: Path) -> Self:
        """The job from a machine without the run volume and without a record of the job."""
        return replace(self, run_root=run_root)

    @property
    def environ(self) -> dict[str, str]:
        root = {"NDCTL_RUN_ROOT": str(self.run_root)}
        return {**super().environ, **self.testbed.environ, **root, **self.extra_environ}

    @property
    def run_dir(self) -> Path:
        """The run directory as the pods see it."""
        return self.testbed.runs / JOB

    def words(self, **options: str) -> tuple[str, ...]:
        """Arguments of `ndctl submit` and `ndctl render`."""
        runs = str(self.testbed.runs)
        output = {
            "cluster__kubernetes__kind": self.kind,
            "cluster__kubernetes__image": "ndctl:1",
            "cluster__kubernetes__namespace": self.namespace,
            "cluster__kubernetes__runs__host_path": runs,
            "cluster__kubernetes__run_root": runs,
            "cluster__gpu": "h100-sxm-80gb",
            "resilience__agent_timeout": AGENT_TIMEOUT_S,
            **TP,
            **options,
        }
        return ("--backend", "kubernetes", *submit_args(**output)[1:])

    def submit(self, *words: str, **options: str) -> CommandResult:
        return self("submit", *self.words(**options), *words)

    def submit_successfully(self, *words: str, **options: str) -> None:
        done = self.submit(*words, **options)
        assert done.code == 0, done.out + done.err

    def submit_and_follow(self, **options: str) -> "subprocess.Popen[str]":
        """Submits the job and follows it."""
        return self.start("submit", *self.words(**options), "--follow")

    def render_to_file(self, **options: str) -> Path:
        """Writes the output of `ndctl render` to a file."""
        manifest = self.testbed.folder / "manifest.yaml"
        manifest.write_text(self.output_of("render", *self.words(**options)))
        return manifest

    def render_and_apply(self, **options: str) -> str:
        """`ndctl render ... | kubectl apply -f -`; returns the output of kubectl."""
        return self.testbed.kubectl("apply", "-f", str(self.render_to_file(**options)))

    def output_of(self, *words: str) -> str:
        """Output of an ndctl command, which must succeed."""
        done = self(*words)
        assert done.code == 0, done.out + done.err
        return done.out

    # The job's state in Kubernetes

    def kubectl(self, *words: str, timeout: float = 120) -> str:
        return self.testbed.kubectl("-n", self.namespace, *words, timeout=timeout)

    def pods(self) -> dict[str, Object]:
        """Host to the job's pod on it. Kubernetes' Job controller keeps failed pods; such a pod
        counts only while no other one is on its host."""
        items = self.testbed.objects("pods", self.namespace, f"ndctl.dev/job={JOB}")
        found = sorted(items, key=lambda pod: not has_ended(pod))
        return {pod["spec"]["nodeName"]: pod for pod in found if "nodeName" in pod["spec"]}

    def running(self) -> dict[str, tuple[str, int]]:
        """Host to the identity of its running pod."""
        found = self.pods().items()
        return {host: identity(pod) for host, pod in found if pod["status"]["phase"] == "Running"}

    def pod_of(self, host: str) -> str:
        name: str = self.pods()[host]["metadata"]["name"]
        return name

    def pids(self, host: str) -> list[int]:
        """Process ids of the host's pod; the agent comes first."""
        return self.testbed.pids(self.pod_of(host), self.namespace)

    def conditions(self) -> list[str]:
        return self.testbed.conditions(RESOURCES[self.kind], JOB, self.namespace)

    # The job's state in its run directory

    def state(self) -> str:
        state: str = self.status()["state"]
        return state

    def has_started(self) -> bool:
        return (self.run_dir / "journal.jsonl").exists() and bool(self.events("LeaderStarted"))

    def reached(self, step: int, attempt: int = 1) -> bool:
        """Whether `step` or a later step was trained in `attempt` or a later attempt."""
        if self.has_ended():
            raise AssertionError(f"the job ended before step {step} of attempt {attempt}")
        lines = self.metrics()
        return any(line["step"] >= step and line["attempt"] >= attempt for line in lines)

    def wait_until(self, what: str, holds: Any, limit: float = LIMIT_S) -> Any:
        """Waits for a condition; the error has a full report of the job."""
        try:
            return wait_for(holds, what, limit)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.failure_report()}") from exc

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        self.wait_until(f"step {step} in attempt {attempt}", lambda: self.reached(step, attempt))

    def wait_for_end(self, state: str = "SUCCEEDED", limit: float = LIMIT_S) -> None:
        self.wait_until("the end", self.has_ended, limit)
        assert self.final_state() == state, self.failure_report()

    def final_state(self) -> str:
        ends = [action for action in self.actions() if action["kind"] == "EndJob"]
        ending: str = ends[-1]["state"]
        return ending

    def assert_all_samples_read_once(self, steps: int = STEPS[-1]) -> None:
        """Checks the ledger of the ranks: each sample of all `steps` was read exactly once."""
        standing = replay((self.run_dir / "samples.jsonl").read_text().splitlines())
        assert standing is not None
        assert (first_mistake(standing), standing.steps) == (None, steps)

    def started_attempts(self) -> list[Object]:
        """The StartAttempt action of each attempt so far."""
        return [action for action in self.actions() if action["kind"] == "StartAttempt"]

    def hosts(self) -> list[str]:
        """Hosts of the current attempt in rank order."""
        hosts: list[str] = self.started_attempts()[-1]["hosts"]
        return hosts

    def leader(self) -> str:
        """Host of the current leader."""
        host: str = self.events("LeaderStarted")[-1]["host"]
        return host

    def incidents(self) -> list[tuple[str, str | None, int | None]]:
        """Kind, culprit host and culprit rank of each incident, in order."""
        return [
            (one["kind"], one["culprit"]["host"], one["culprit"]["rank"])
            for one in self.status()["incidents"]
        ]

    def failure_report(self) -> str:
        """Objects, events and logs that explain why a test failed."""
        lines = []
        for words in (
            ("get", f"{RESOURCES[self.kind]},pods", "-o", "wide"),
            ("describe", "pods"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        ):
            with contextlib.suppress(TestbedError, TimeoutError):
                lines += [f"== kubectl {' '.join(words)}", self.kubectl(*words)]
        for pod in self._pod_names():
            with contextlib.suppress(TestbedError, TimeoutError):
                output = self.kubectl("logs", pod).splitlines()
                kept = [line[:300] for line in output if not line.startswith("ndctl-")]
                lines += [f"== log of {pod}", *kept[-TAIL:]]
        if self.run_dir.exists():
            text = self.with_run_volume()("describe", JOB)
            events = self.with_run_volume()("events", JOB)
            lines += ["== describe", text.out + text.err, "== events", events.out + events.err]
        lines += ["== stand-ins", self.testbed.log.read_text()[-2000:]]
        return "\n".join(lines)

    def _pod_names(self) -> list[str]:
        try:
            return list(self.testbed.phases(namespace=self.namespace))
        except (TestbedError, TimeoutError):
            return []

    def with_run_volume(self) -> Self:
        return replace(self, run_root=self.testbed.runs)

    # The job's processes

    def assert_nothing_left(self) -> None:
        """Waits until no process of the job is left on any node."""

        def left() -> dict[int, str]:
            return processes_of(self.run_dir)

        wait_for(lambda: not left(), f"the end of {left()}", LIMIT_S)


@contextlib.contextmanager
def job_on(testbed: KubeTestbed, run_root: Path, kind: str = "pytorchjob") -> Iterator[KubeNdctl]:
    """A job in the namespace of manifests/base, whose pod security allows host paths. The job is
    deleted afterwards in any case."""
    testbed.kubectl("apply", "-k", "manifests/overlays/rdma")
    testbed.wait_for(
        "its ServiceAccount", lambda: testbed.get("serviceaccounts", "default", NAMESPACE)
    )
    job = KubeNdctl(run_root, testbed, kind)
    try:
        yield job
    finally:
        if processes_of(job.run_dir):
            testbed.restore()
            job.assert_nothing_left()


def has_ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def identity(pod: Object) -> tuple[str, int]:
    """Identifies a pod and its container: both values change when they are replaced."""
    (container,) = pod["status"]["containerStatuses"]
    return pod["metadata"]["uid"], container["restartCount"]


@contextlib.contextmanager
def controller(job: KubeNdctl) -> Iterator[None]:
    """Runs ndctl's controller for the job's namespace, as a process of this machine.

    Leaders may then read its Lease, without which they send it no request. Yields when it is the
    active controller.
    """
    testbed, namespace = job.testbed, job.namespace
    testbed.kubectl("apply", "-n", namespace, "-f", str(REPOSITORY / CONTROLLER_ACCOUNT))
    argv = [sys.executable, "-m", "orchestrator", "controller", "-n", job.namespace]
    with (
        (testbed.folder / "controller.log").open("ab") as log,
        subprocess.Popen(argv, env=testbed.environ, cwd=REPOSITORY, stderr=log) as process,
    ):
        try:
            testbed.wait_for(
                "its Lease", lambda: testbed.get("leases.coordination.k8s.io", LEASE, namespace)
            )
            yield
        finally:
            process.terminate()
