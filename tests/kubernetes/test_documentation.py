"""The commands of docs/kubernetes.md work on a real API server, and its tables are complete."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from msgspec.structs import fields

from orchestrator.contract.files import exit_codes
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec, RunVolume
from tests.kubernetes.testbed import KubeTestbed, running_testbed
from tests.site_document import ROOT, commands_in, keys_of_a_site, with_ndctl

DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
COMMANDS = commands_in(DOCUMENT)

SUBMIT = "ndctl submit examples/kubernetes.yaml"
SUSPEND, RESUME = (
    "kubectl -n ndctl patch pytorchjob kubernetes-demo --type=merge"
    f""" -p '{{"spec":{{"runPolicy":{{"suspend":{holds}}}}}}}\'"""
    for holds in ("true", "false")
)
WITHOUT_A_JOB: Mapping[str, str] = {
    "make install": "",
    "kubectl apply -k manifests/base": r"namespace/ndctl created\n",
    "kubectl -n ndctl apply -f manifests/examples/runs-claim.yaml": r"ndctl-runs created",
    "kubectl -n ndctl create rolebinding ndctl-alice --role=ndctl-user --user=alice": "created",
    "kubectl create clusterrolebinding ndctl-alice --clusterrole=ndctl-inventory --user=alice": (
        "created"
    ),
    "ndctl doctor examples/kubernetes.yaml": r"run volume +ndctl-runs is (Bound|Pending), ",
    "ndctl inventory --backend kubernetes": r"4 hosts free, 8 devices",
    "kubectl -n ndctl create secret generic hub --from-literal=token=hf_…": "secret/hub created",
    "ndctl validate examples/kubernetes.yaml": r"valid; 4 ranks",
    "ndctl plan examples/kubernetes.yaml": r"4 ranks on 2 hosts x 2 of cpu",
    "ndctl render examples/kubernetes.yaml": r"\nkind: PyTorchJob\n",
    f"{SUBMIT} --dry-run=client": r"\nkind: PyTorchJob\n",
    f"{SUBMIT} --dry-run": r"# dry run: .* accepts the 7 objects of \S+ ndctl/kubernetes-demo",
    "kubectl apply -k manifests/overlays/kueue": r"localqueue.kueue.x-k8s.io/train created",
    "ndctl render examples/kubernetes.yaml --set cluster.kubernetes.queue=train": (
        r"\n    kueue.x-k8s.io/queue-name: train\n"
    ),
    "kubectl apply -k manifests/overlays/rdma": r"namespace/ndctl configured",
    "ndctl render examples/kubernetes-rdma.yaml": r"rdma/hca_shared_devices_a: '1'",
    "ndctl hosts": r"no strikes",
    "kubectl apply -k manifests/controller": r"deployment.apps/ndctl-controller created",
    "ndctl controller -n ndctl --once": r"\d+ requests were sent",
}
"""Each command of the document that needs no job, and a pattern of its output."""
WITH_A_JOB: Mapping[str, str] = {
    SUBMIT: r"submitted kubernetes-demo to kubernetes",
    "ndctl list": r"kubernetes-demo +\S+ +RUNNING",
    "ndctl status kubernetes-demo": r"PyTorchJob ndctl/kubernetes-demo",
    "ndctl events kubernetes-demo": r"attempt 1",
    "ndctl describe kubernetes-demo": r"node\d +ranks 0-1",
    "ndctl logs kubernetes-demo --tail 5": r"\[node\d rank 0\]",
    "ndctl dashboard kubernetes-demo": r"kubernetes-demo",
    "kubectl -n ndctl get pytorchjobs,pods -l ndctl.dev/job=kubernetes-demo": (
        r"kubernetes-demo-worker-0 +1/1 +Running"
    ),
    "kubectl -n ndctl describe pytorchjob kubernetes-demo": r"Normal +Started .* ndctl +attempt 1",
    "kubectl -n ndctl get configmaps -l ndctl.dev/holds=state -o"
    r" 'custom-columns=JOB:.metadata.labels.ndctl\.dev/job,STATE:.data.state,STEP:.data.step,"
    "OF:.data.steps,ATTEMPT:.data.attempt,CULPRIT:.data.culprit'": (
        r"kubernetes-demo +RUNNING +\d+ +1000 +1 "
    ),
    "ndctl list -n ndctl": r"kubernetes-demo +\S+ +RUNNING",
    "ndctl status kubernetes-demo -n ndctl": r"RUNNING",
    SUSPEND: "patched",
    RESUME: "patched",
    "ndctl cancel kubernetes-demo": r"kubernetes-demo: CANCELLED",
    f"{SUBMIT} --resume": r"submitted kubernetes-demo to kubernetes",
    "kubectl -n ndctl delete pytorchjob kubernetes-demo": r"deleted",
    "ndctl render examples/kubernetes.yaml --set name=by-hand | kubectl apply -f -": (
        r"pytorchjob.kubeflow.org/by-hand created"
    ),
    "kubectl -n ndctl get pytorchjob by-hand": r"by-hand",
    "ndctl cancel by-hand -n ndctl": r"by-hand: CANCELLED",
    "ndctl render examples/kubernetes.yaml --set name=by-hand | kubectl delete -f -": (
        r"pytorchjob.kubeflow.org \"by-hand\" deleted"
    ),
    "ndctl render examples/kubernetes.yaml --kind jobset --set name=by-jobset"
    " | kubectl apply -f -": r"jobset.jobset.x-k8s.io/by-jobset created",
    "ndctl status by-jobset -n ndctl": r"JobSet ndctl/by-jobset",
    "ndctl cancel by-jobset": r"by-jobset: CANCELLED",
    "ndctl render examples/kubernetes.yaml --kind trainjob --set name=by-trainjob"
    " | kubectl apply -f -": r"trainjob.trainer.kubeflow.org/by-trainjob created",
    "ndctl status by-trainjob -n ndctl": r"TrainJob ndctl/by-trainjob",
    "ndctl cancel by-trainjob": r"by-trainjob: CANCELLED",
    r"kubectl -n ndctl get jobsets -o 'custom-columns=NAME:.metadata.name,"
    r"STATE:.metadata.annotations.ndctl\.dev/state,STEP:.metadata.annotations.ndctl\.dev/step,"
    r"CULPRIT:.metadata.annotations.ndctl\.dev/culprit'": r"by-jobset +CANCELLED +\d+/1000 ",
}
"""Each of the other commands, and a pattern of its output."""
OUTPUTS = {**WITHOUT_A_JOB, **WITH_A_JOB}
STATUS_OF_OTHER_KINDS = [f"ndctl status {name} -n ndctl" for name in ("by-jobset", "by-trainjob")]


@pytest.fixture
def docs_runner(kube_available: None, tmp_path: Path) -> "Iterator[DocsRunner]":
    """A separate cluster, because the administrator's objects are not removed afterwards."""
    with running_testbed() as testbed:
        testbed.apply(*_kueue_kinds())
        yield DocsRunner(testbed, tmp_path)


class DocsRunner:
    def __init__(self, testbed: KubeTestbed, folder: Path) -> None:
        self.testbed = testbed
        self.environ = with_ndctl(testbed.environ, folder)

    def __call__(self, command: str) -> str:
        """Runs a command and returns its output."""
        # A dry run: `make install` would change the environment of this test.
        line = command.replace("make ", "make --dry-run ")
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            env=self.environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def check(self, command: str) -> None:
        output = self(command)
        assert re.search(OUTPUTS[command], output), f"{command}:\n{output}"

    def pods(self) -> dict[str, str]:
        """Phases of the pods of jobs, without those of the controller."""
        return self.testbed.phases("ndctl.dev/job", namespace="ndctl")

    def wait_for_event(self, words: str) -> None:
        self.wait_for_words("ndctl events kubernetes-demo", words)

    def wait_for_words(self, command: str, words: str) -> None:
        self.testbed.wait_for(words, lambda: words in self(command), timeout=600)


def _kueue_kinds() -> list[dict[str, object]]:
    """CRDs with which an API server without Kueue accepts any object of Kueue."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1beta1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": anything},
    }
    made: list[dict[str, object]] = []
    for path in (ROOT / "manifests" / "overlays" / "kueue").glob("*.yaml"):
        for item in yaml.safe_load_all(path.read_text()):
            if item["apiVersion"] != "kueue.x-k8s.io/v1beta1":
                continue
            kind = item["kind"]
            plural = f"{kind.lower()}s".replace("ys", "ies")
            scope = "Namespaced" if kind == "LocalQueue" else "Cluster"
            names = {"kind": kind, "plural": plural, "singular": kind.lower()}
            spec = {"group": "kueue.x-k8s.io", "scope": scope, "names": names}
            made.append(
                {
                    "apiVersion": "apiextensions.k8s.io/v1",
                    "kind": "CustomResourceDefinition",
                    "metadata": {"name": f"{plural}.kueue.x-k8s.io"},
                    "spec": {**spec, "versions": [version]},
                }
            )
    return made


@pytest.mark.kubernetes
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_commands_do_what_the_document_says(docs_runner: DocsRunner) -> None:
    for command in COMMANDS:
        docs_runner.check(command)
        if command == SUBMIT:
            docs_runner.wait_for_event("checkpoint step-10 is complete")
        elif command == SUSPEND:
            docs_runner.testbed.wait_for(
                "all pods gone", lambda: not docs_runner.pods(), timeout=400
            )
        elif command == RESUME:
            docs_runner.wait_for_event("from checkpoint step-")
            assert "restarts    attempt 2, 0 restarts" in docs_runner(
                "ndctl status kubernetes-demo"
            )
        elif command in STATUS_OF_OTHER_KINDS:
            # A job that is cancelled before its leader answers is suspended and loses its pods.
            docs_runner.wait_for_words(command, ": RUNNING")
        elif " delete " in command:
            docs_runner.testbed.wait_for(
                "all pods gone", lambda: not docs_runner.pods(), timeout=400
            )
    assert set(docs_runner.pods().values()) == {"Succeeded"}, "the pods of a cancelled job stay"


@pytest.mark.kubernetes
@pytest.mark.process
@pytest.mark.slow
def test_the_commands_before_a_job_do_what_the_document_says(
    kube: KubeTestbed, tmp_path: Path
) -> None:
    docs_runner = DocsRunner(kube, tmp_path)
    roles = ("clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/part-of=ndctl")
    kube.kubectl("delete", *roles)
    kube.kubectl("delete", "clusterrolebinding", "ndctl-alice", "--ignore-not-found")
    for command in COMMANDS:
        if command in WITHOUT_A_JOB and "kueue" not in command:
            docs_runner.check(command)
    may = ["kubectl", "auth", "can-i", "-n", "ndctl", "--as=alice"]
    assert kube([*may, "create", "pytorchjobs.kubeflow.org"]).out.strip() == "yes"
    assert kube([*may, "create", "pods"]).out.strip() == "no"
    assert kube([*may, "list", "nodes"]).out.strip() == "yes"


def test_every_command_of_the_document_is_run() -> None:
    assert set(COMMANDS) == set(OUTPUTS)


def test_every_key_of_a_site_is_documented() -> None:
    keys = {field.name for field in fields(KubernetesSpec)} - {"runs"}
    keys |= {f"runs.{field.name}" for field in fields(RunVolume)}
    assert keys_of_a_site(DOCUMENT) == keys


def test_documented_exit_codes_of_pods_are_complete() -> None:
    table = DOCUMENT.partition("## Exit codes of pods")[2].partition("## ")[0]
    found = dict(re.findall(r"^\| (\d+)\b.*\| ([^|]+) \|$", table, re.MULTILINE))
    known = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert {int(code) for code in found} - {128 + 9} <= known
    assert {code for code, pod in found.items() if pod == "replaced"} == {"137", "211", "212"}
