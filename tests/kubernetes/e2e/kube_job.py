"""The job of `tests/e2e` on a real Kubernetes API server, through the command line."""

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tests.e2e.job import CommandResult, Ndctl, processes_of, submit_args, wait_for
from tests.kubernetes.testbed import KubeTestbed, Object
from tests.testbeds import TestbedError
from trainer.data.ledger_check import first_mistake, replay

JOB = "e2e"
NAMESPACE = "ndctl"
"""As manifests/base has it."""
LIMIT_S = 600.0
"""For what takes seconds on a quiet machine."""
TAIL = 60
"""Lines of each pod's log, in the story of a failure."""
PATIENCE_S = "30"
"""Of agents and leader with each other: beside an API server one may stand still for seconds."""
STEPS = range(1, 25)
"""That the job trains."""
LONG = {"train__steps": "5000", "checkpoint__every_steps": "5000"}
"""Steps enough to look at the job meanwhile; no checkpoint but those that it is asked for."""
RESOURCES = {
    "pytorchjob": "pytorchjobs.kubeflow.org",
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainjob": "trainjobs.trainer.kubeflow.org",
}
Options = Mapping[str, str]


@dataclass(frozen=True)
class KubeNdctl(Ndctl):
    """`ndctl` on a machine outside the cluster. Pods mount the run root at its own path, so that
    processes tell whose they are."""

    testbed: KubeTestbed
    kind: str = "pytorchjob"
    namespace: str = NAMESPACE
    extra_environ: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the environment."""

    def from_other_machine(self, run_root: Path) -> Self:
        """On a machine that has not mounted the run volume, and knows of no job."""
        return replace(self, run_root=run_root)

    @property
    def environ(self) -> dict[str, str]:
        root = {"NDCTL_RUN_ROOT": str(self.run_root)}
        return {**super().environ, **self.testbed.environ, **root, **self.extra_environ}

    @property
    def run_dir(self) -> Path:
        """Where the pods have it."""
        return self.testbed.runs / JOB

    def words(self, **options: str) -> tuple[str, ...]:
        """What follows `ndctl submit` or `ndctl render`, less the backend's own words."""
        runs = str(self.testbed.runs)
        said = {
            "cluster__kubernetes__kind": self.kind,
            "cluster__kubernetes__image": "ndctl:1",
            "cluster__kubernetes__namespace": self.namespace,
            "cluster__kubernetes__runs__host_path": runs,
            "cluster__kubernetes__run_root": runs,
            "cluster__gpu": "h100-sxm-80gb",
            "resilience__agent_timeout": PATIENCE_S,
            **options,
        }
        return ("--backend", "kubernetes", *submit_args(**said)[1:])

    def submit(self, *words: str, **options: str) -> CommandResult:
        return self("submit", *self.words(**options), *words)

    def submit_successfully(self, *words: str, **options: str) -> None:
        done = self.submit(*words, **options)
        assert done.code == 0, done.out + done.err

    def submit_and_follow(self, **options: str) -> "subprocess.Popen[str]":
        """Submits the job and follows it."""
        return self.start("submit", *self.words(**options), "--follow")

    def render_to_file(self, **options: str) -> Path:
        """A file of what `ndctl render` printed."""
        manifest = self.testbed.folder / "manifest.yaml"
        manifest.write_text(self.output_of("render", *self.words(**options)))
        return manifest

    def render_and_apply(self, **options: str) -> str:
        """`ndctl render ... | kubectl apply -f -`; what kubectl said."""
        return self.testbed.kubectl("apply", "-f", str(self.render_to_file(**options)))

    def output_of(self, *words: str) -> str:
        """What a view printed."""
        done = self(*words)
        assert done.code == 0, done.out + done.err
        return done.out

    # What Kubernetes has of it

    def kubectl(self, *words: str, timeout: float = 120) -> str:
        return self.testbed.kubectl("-n", self.namespace, *words, timeout=timeout)

    def pods(self) -> dict[str, Object]:
        """Host to its pod."""
        items = self.testbed.objects("pods", self.namespace, f"ndctl.dev/job={JOB}")
        return {pod["spec"]["nodeName"]: pod for pod in items if "nodeName" in pod["spec"]}

    def running(self) -> dict[str, tuple[str, int]]:
        """Host to what tells its pod from any other."""
        found = self.pods().items()
        return {host: identity(pod) for host, pod in found if pod["status"]["phase"] == "Running"}

    def pod_of(self, host: str) -> str:
        name: str = self.pods()[host]["metadata"]["name"]
        return name

    def pids(self, host: str) -> list[int]:
        """The agent's comes first."""
        return self.testbed.pids(self.pod_of(host), self.namespace)

    def conditions(self) -> list[str]:
        return self.testbed.conditions(RESOURCES[self.kind], JOB, self.namespace)

    # What the job says of itself

    def state(self) -> str:
        state: str = self.status()["state"]
        return state

    def has_started(self) -> bool:
        return (self.run_dir / "journal.jsonl").exists() and bool(self.events("LeaderStarted"))

    def reached(self, step: int, attempt: int = 1) -> bool:
        """Whether `attempt`, or a later one, has trained `step` or a later one."""
        if self.has_ended():
            raise AssertionError(f"it ended before step {step} of attempt {attempt}")
        lines = self.metrics()
        return any(line["step"] >= step and line["attempt"] >= attempt for line in lines)

    def wait_until(self, what: str, holds: Any, limit: float = LIMIT_S) -> Any:
        """Wait for it; who reads of a failure gets all that is known."""
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
        """Those of all `steps`, by the ledger that the ranks keep."""
        standing = replay((self.run_dir / "samples.jsonl").read_text().splitlines())
        assert standing is not None
        assert (first_mistake(standing), standing.steps) == (None, steps)

    def started_attempts(self) -> list[Object]:
        """One for each attempt so far."""
        return [action for action in self.actions() if action["kind"] == "StartAttempt"]

    def hosts(self) -> list[str]:
        """Of the present attempt, in the order of their ranks."""
        hosts: list[str] = self.started_attempts()[-1]["hosts"]
        return hosts

    def leader(self) -> str:
        """The host of the present one."""
        host: str = self.events("LeaderStarted")[-1]["host"]
        return host

    def incidents(self) -> list[tuple[str, str | None, int | None]]:
        """Kind, host and rank to blame, in order."""
        return [
            (one["kind"], one["culprit"]["host"], one["culprit"]["rank"])
            for one in self.status()["incidents"]
        ]

    def failure_report(self) -> str:
        """What a person needs to find out why a test failed."""
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
                said = self.kubectl("logs", pod).splitlines()
                kept = [line[:300] for line in said if not line.startswith("ndctl-")]
                lines += [f"== log of {pod}", *kept[-TAIL:]]
        if self.run_dir.exists():
            told = self.with_run_volume()("describe", JOB)
            events = self.with_run_volume()("events", JOB)
            lines += ["== describe", told.out + told.err, "== events", events.out + events.err]
        lines += ["== stand-ins", self.testbed.log.read_text()[-2000:]]
        return "\n".join(lines)

    def _pod_names(self) -> list[str]:
        try:
            return list(self.testbed.phases(namespace=self.namespace))
        except (TestbedError, TimeoutError):
            return []

    def with_run_volume(self) -> Self:
        return replace(self, run_root=self.testbed.runs)

    # What runs

    def assert_nothing_left(self) -> None:
        """No process of the job on any node."""

        def left() -> dict[int, str]:
            return processes_of(self.run_dir)

        wait_for(lambda: not left(), f"the end of {left()}", LIMIT_S)


@contextlib.contextmanager
def job_on(testbed: KubeTestbed, run_root: Path, kind: str = "pytorchjob") -> Iterator[KubeNdctl]:
    """A job in the namespace of manifests/base, which lets in pods with host paths; gone
    afterwards, whatever came of it."""
    testbed.kubectl("apply", "-k", "manifests/overlays/rdma")
    testbed.wait_for("its account", lambda: testbed.get("serviceaccounts", "default", NAMESPACE))
    job = KubeNdctl(run_root, testbed, kind)
    try:
        yield job
    finally:
        if processes_of(job.run_dir):
            testbed.restore()
            job.assert_nothing_left()


def identity(pod: Object) -> tuple[str, int]:
    """What tells a pod, and its container, from those that come after it."""
    (container,) = pod["status"]["containerStatuses"]
    return pod["metadata"]["uid"], container["restartCount"]
