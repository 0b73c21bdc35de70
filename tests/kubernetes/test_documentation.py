"""docs/kubernetes.md says what is true: its commands, in order, on a real API server; keys."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from orchestrator.contract.files import exit_codes
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec, RunVolume
from tests.kubernetes.testbed import KubeTestbed, running_testbed

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]

SUBMIT = "ndctl submit examples/kubernetes.yaml"
SUSPEND, GO_ON = (
    "kubectl -n ndctl patch pytorchjob kubernetes-demo --type=merge"
    f""" -p '{{"spec":{{"runPolicy":{{"suspend":{holds}}}}}}}\'"""
    for holds in ("true", "false")
)
ALONE: Mapping[str, str] = {
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
    f"{SUBMIT} --dry-run": r"# dry run: .* takes the 7 objects of PyTorchJob ndctl/kubernetes-demo",
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
"""Each command of the document that needs no job -> what it prints here."""
WITH_A_JOB: Mapping[str, str] = {
    SUBMIT: r"submitted kubernetes-demo to kubernetes",
    "ndctl list": r"kubernetes-demo +RUNNING",
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
    "ndctl list -n ndctl": r"kubernetes-demo +RUNNING",
    "ndctl status kubernetes-demo -n ndctl": r"RUNNING",
    SUSPEND: "patched",
    GO_ON: "patched",
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
"""Each of the others."""
SAYS = {**ALONE, **WITH_A_JOB}
ALONGSIDE = [f"ndctl status {name} -n ndctl" for name in ("by-jobset", "by-trainjob")]


@pytest.fixture
def told(kube_there: None, tmp_path: Path) -> "Iterator[Told]":
    """A cluster of its own: what administrators make is not taken back."""
    with running_testbed() as testbed:
        testbed.apply(*_kueue_kinds())
        yield Told(testbed, tmp_path)


class Told:
    def __init__(self, testbed: KubeTestbed, folder: Path) -> None:
        self.testbed = testbed
        own = folder / "bin"
        own.mkdir()
        (own / "ndctl").write_text(f'#!/bin/sh\nexec {sys.executable} -m orchestrator "$@"\n')
        (own / "ndctl").chmod(0o755)
        self.environ = {
            **testbed.environ,
            "PATH": f"{own}:{testbed.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "NDCTL_RUN_ROOT": str(folder / "runs"),
            "COLUMNS": "120",
        }

    def __call__(self, command: str) -> str:
        """What it printed."""
        line = command.replace("make ", "make --dry-run ")  # not over what the tests run in
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
        said = self(command)
        assert re.search(SAYS[command], said), f"{command}:\n{said}"

    def pods(self) -> dict[str, str]:
        """Of jobs: the controller's stay."""
        return self.testbed.phases("ndctl.dev/job", namespace="ndctl")

    def await_event(self, words: str) -> None:
        self.await_words("ndctl events kubernetes-demo", words)

    def await_words(self, command: str, words: str) -> None:
        self.testbed.wait_for(words, lambda: words in self(command), timeout=600)


def _kueue_kinds() -> list[dict[str, object]]:
    """What an API server needs to take Kueue's objects, whatever is in them: there is no Kueue."""
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
def test_the_commands_do_what_the_document_says(told: Told) -> None:
    for command in COMMANDS:
        told.check(command)
        if command == SUBMIT:
            told.await_event("checkpoint step-10 is complete")
        elif command == SUSPEND:
            told.testbed.wait_for("all pods gone", lambda: not told.pods(), timeout=400)
        elif command == GO_ON:
            told.await_event("from checkpoint step-")
            assert "restarts    attempt 2, 0 restarts" in told("ndctl status kubernetes-demo")
        elif command in ALONGSIDE:
            # What is cancelled before a pod can be asked is suspended, and has none to look at.
            told.await_words(command, ": RUNNING")
        elif " delete " in command:
            told.testbed.wait_for("all pods gone", lambda: not told.pods(), timeout=400)
    assert set(told.pods().values()) == {"Succeeded"}, "what is cancelled stays to be looked at"


@pytest.mark.kubernetes
@pytest.mark.process
@pytest.mark.slow
def test_the_commands_before_a_job_do_what_the_document_says(
    kube: KubeTestbed, tmp_path: Path
) -> None:
    told = Told(kube, tmp_path)
    roles = ("clusterrole,clusterrolebinding", "-l", "app.kubernetes.io/part-of=ndctl")
    kube.kubectl("delete", *roles)
    kube.kubectl("delete", "clusterrolebinding", "ndctl-alice", "--ignore-not-found")
    for command in COMMANDS:
        if command in ALONE and "kueue" not in command:
            told.check(command)
    may = ["kubectl", "auth", "can-i", "-n", "ndctl", "--as=alice"]
    assert kube([*may, "create", "pytorchjobs.kubeflow.org"]).out.strip() == "yes"
    assert kube([*may, "create", "pods"]).out.strip() == "no"
    assert kube([*may, "list", "nodes"]).out.strip() == "yes"


def test_every_command_of_the_document_is_run() -> None:
    assert set(COMMANDS) == set(SAYS)


def test_every_key_of_a_site_is_documented() -> None:
    table = DOCUMENT.partition("## Keys of a site")[2].partition("## ")[0]
    cells = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    keys = {field.name for field in fields(KubernetesSpec)} - {"runs"}
    keys |= {f"runs.{field.name}" for field in fields(RunVolume)}
    assert documented == keys


def test_documented_exit_codes_of_pods_are_complete() -> None:
    table = DOCUMENT.partition("## Exit codes of pods")[2].partition("## ")[0]
    found = dict(re.findall(r"^\| (\d+)\b.*\| ([^|]+) \|$", table, re.MULTILINE))
    known = {value for name, value in vars(exit_codes).items() if name.isupper()}
    assert {int(code) for code in found} - {128 + 9} <= known
    assert {code for code, pod in found.items() if pod == "replaced"} == {"137", "211", "212"}
