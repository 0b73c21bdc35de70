"""What ndctl asks of a large Kubernetes cluster, and how long it takes, beside kubectl.

    python -m benchmarks.kubernetes [LOOKS]

A real API server, scheduler and controller manager with 1,000 fake nodes of 8 GPUs, and one job of
512 pods, which the stand-in kubelet only says run. Measured in turn, LOOKS times: `ndctl plan`
(inventory and plan) and `kubectl get` of what it reads; `ndctl submit` and `kubectl apply` of what
it sends; the leader's allocation, its placement of ranks, and a round of its questions; a look of
a dashboard; `ndctl status` and `kubectl get` of the pods. Prints markdown; requests are counted
where they are sent.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.measure.timing import machine, ratio, spread
from orchestrator.app.remote import REFRESH_S
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.inventory import read_cluster
from orchestrator.backends.kubernetes.mirror.find_mirrors import seek_mirror
from orchestrator.backends.kubernetes.mirror.mirror import contents
from orchestrator.backends.kubernetes.resources import CONFIG_MAPS
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.contract.submission_payload import Handover, handover_from
from orchestrator.job.hosts.scheduler_notices import NOTICES_S
from orchestrator.journal.run_dir_init import begin
from orchestrator.plan.placement.place import place
from orchestrator.system import SystemClock
from tests.kubernetes.standins.nodes import Shape
from tests.kubernetes.standins.processless import ANNOTATION
from tests.kubernetes.testbed import KubeTestbed, running_testbed

NODES, PODS, GPUS = 1000, 512, 8
LIMITS_S = {"plan": 10.0, "submit": 15.0, "place": 5.0, "status": 5.0}
"""Of the medians, on an idle machine of two cores."""
MOST_PER_MINUTE = 60
"""Requests, of a leader or of somebody who looks, however many pods there are."""
RUN_S = 900.0
SPEC = """\
name: large
model: {{preset: llama3-8b}}
data: {{files: /data/*.parquet, tokenizer: /data/tokenizer, sequence_length: 8192}}
train: {{steps: 1000, global_batch_size: {batch}, dtype: bfloat16, optimizer: {{lr: 3.0e-4}}}}
cluster:
  backend: kubernetes
  hosts: {pods}
  gpus_per_host: {gpus}
  kubernetes:
    image: none
    service_account: default
    runs: {{host_path: {runs}}}
    run_root: {runs}
    python: {python}
    shm: null
    annotations: {{{annotation}: "yes"}}
"""
Times = dict[str, list[float]]
T = TypeVar("T")


def main(looks: int) -> None:
    shape = Shape(nodes=NODES, gpus=GPUS, leaf=16, cpu="128", memory="1Ti")
    with running_testbed(shape) as testbed, tempfile.TemporaryDirectory() as folder:
        print(f"{machine()}; {testbed.kubectl('version', '--short').splitlines()[-1]}")
        print(f"load {os.getloadavg()[0]:.1f} before", flush=True)
        measure(testbed, Path(folder), looks)
        print(f"load {os.getloadavg()[0]:.1f} at the end")


def measure(testbed: KubeTestbed, folder: Path, looks: int) -> None:
    spec = folder / "large.yaml"
    spec.write_text(
        SPEC.format(
            pods=PODS,
            batch=PODS * GPUS,
            gpus=GPUS,
            runs=testbed.runs,
            python=sys.executable,
            annotation=ANNOTATION,
        )
    )
    times: Times = {}
    requests: dict[str, int] = {}
    plan = (*NDCTL, "plan", str(spec))
    read = ("kubectl", "get", "nodes,pods", "--all-namespaces", "-o", "json")
    for _ in range(looks):
        _timed(times, "plan", lambda: _run(testbed, *plan))
        _timed(times, "kubectl plan", lambda: _run(testbed, *read))
    admin = Api(None, testbed.environ, SystemClock())
    read_cluster(admin)
    requests["plan"] = admin.requests
    _submit(testbed, spec, folder, times)
    _await_pods(testbed)
    _look(testbed, folder / "runs", looks, times, requests)
    _print(times, requests)


NDCTL = (sys.executable, "-m", "orchestrator")


def _submit(testbed: KubeTestbed, spec: Path, folder: Path, times: Times) -> None:
    """`kubectl apply` first, where a quota lets no pod come up."""
    testbed.namespace("still")
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "still"}}
    testbed.apply({**quota, "spec": {"hard": {"pods": "0"}}}, namespace="still")
    text = folder / "large-rendered.yaml"
    text.write_text(_run(testbed, *NDCTL, "render", str(spec)))
    apply = ("kubectl", "-n", "still", "apply", "-f", str(text))
    _timed(times, "kubectl submit", lambda: _run(testbed, *apply))
    testbed.kubectl("-n", "still", "delete", "pytorchjob", "large")
    root = f"--run-root={folder / 'runs'}"
    _timed(times, "submit", lambda: _run(testbed, *NDCTL, "submit", str(spec), root))


def _await_pods(testbed: KubeTestbed) -> None:
    begun = time.perf_counter()
    select = ("-l", "ndctl.dev/job=large", "--field-selector=status.phase=Running")
    deadline = begun + RUN_S
    while (running := len(testbed.kubectl("get", "pods", "-o", "name", *select).split())) < PODS:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"{running} of {PODS} pods run")
        time.sleep(1.0)
    seconds = time.perf_counter() - begun
    print(f"{PODS} pods run {seconds:.0f} s after the submission: operator, scheduler, kubelets")


def _look(
    testbed: KubeTestbed, runs: Path, looks: int, times: Times, requests: dict[str, int]
) -> None:
    clock = SystemClock()
    handover = _handover(testbed)
    launch = handover.job.launch
    begin(RunDir(Path(launch.run_dir)), handover, clock, token=True)  # as the leader's pod would
    leader = KubernetesBackend(testbed.environ, clock)
    api = leader.api(launch.kubernetes or KubernetesSpec())
    copy = seek_mirror(runs, "large", None, "default", testbed.environ, clock)
    status = (*NDCTL, "status", "large", f"--run-root={runs}")
    pods = ("kubectl", "get", "pods", "-l", "ndctl.dev/job=large", "-o", "json")

    def counted(name: str, api: Api, do: Callable[[], T]) -> T:
        before = api.requests
        done = _timed(times, name, do)
        requests[name] = api.requests - before
        return done

    for _ in range(looks):
        granted = counted("allocation", api, lambda: leader.allocation(launch))
        assert granted is not None
        assert len(granted.hosts) == PODS
        where = partial(place, handover.job.plan, granted.hosts, switches=granted.switches)
        _timed(times, "place", where)
        notices = counted("notices", api, partial(leader.notices, launch, granted.hosts))
        assert notices == ()
        counted("glance", api, lambda: leader.glance([launch]))
        counted("refresh", copy.api, copy.refresh)
        assert copy.has_begun
        _timed(times, "status", lambda: _run(testbed, *status))
        _timed(times, "kubectl pods", lambda: _run(testbed, *pods))


def _handover(testbed: KubeTestbed) -> Handover:
    api = Api(None, testbed.environ, SystemClock())
    found = api.get(CONFIG_MAPS, "default", "large-launch")
    assert found is not None
    return handover_from(contents(found))


def _print(times: Times, requests: Mapping[str, int]) -> None:
    rows = (
        ("inventory and plan: `ndctl plan`", "plan", "kubectl plan", "`kubectl get nodes,pods -A`"),
        ("`ndctl submit`", "submit", "kubectl submit", "`kubectl apply` of what it sends"),
        ("leader: what it was granted", "allocation", "kubectl pods", "`kubectl get pods`"),
        ("leader: where ranks go", "place", "", ""),
        ("leader: a round of questions", "notices", "kubectl pods", "`kubectl get pods`"),
        ("what Kubernetes has of the job", "glance", "kubectl pods", "`kubectl get pods`"),
        ("dashboard: a look", "refresh", "", ""),
        ("`ndctl status`", "status", "kubectl pods", "`kubectl get pods`"),
    )
    print(f"\n| {NODES:,} nodes, {PODS} pods | ndctl | requests | beside it | ratio | limit |")
    print("|---|---|---|---|---|---|")
    for what, name, other, words in rows:
        limit = LIMITS_S.get(name)
        beside = f"{words} {spread(times[other], 's', 2)}" if other else ""
        shown = ratio(times, name, other) if other else ""
        print(
            f"| {what} | {spread(times[name], 's', 2)} | {requests.get(name, '')} | {beside}"
            f" | {shown} | {'' if limit is None else f'{limit:.0f} s'} |"
        )
    print("\n| requests a minute | | a pod |\n|---|---|---|")
    minutes = {
        "a leader": requests["notices"] * 60 / NOTICES_S,
        "a dashboard, `--follow`": requests["refresh"] * 60 / REFRESH_S,
    }
    for what, count in minutes.items():
        held = "" if count <= MOST_PER_MINUTE else f" NOT within {MOST_PER_MINUTE}"
        print(f"| {what} | {count:.0f}{held} | {count / PODS:.3f} |")


def _timed(times: Times, name: str, do: Callable[[], T]) -> T:
    begun = time.perf_counter()
    done = do()
    times.setdefault(name, []).append(time.perf_counter() - begun)
    return done


def _run(testbed: KubeTestbed, *argv: str) -> str:
    done = subprocess.run(
        argv, env=testbed.environ, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr or done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
