"""Submitted to a real API server: with one right missing at a time, and with the server lost in the
middle. Whatever happens, there is a whole job that is known here, or nothing."""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.app.planning import plans
from orchestrator.app.submission import submit_job
from orchestrator.backends.kubernetes.api.api_errors import Forbidden
from orchestrator.backends.kubernetes.api.client import Api
from orchestrator.backends.kubernetes.backend import KubernetesBackend
from orchestrator.backends.kubernetes.checks.permissions import Right, needed
from orchestrator.backends.kubernetes.mirror.mirror_paths import known_mirrors
from orchestrator.backends.kubernetes.resources import JOB_KINDS, Object
from orchestrator.contract.files import exit_codes
from orchestrator.contract.spec.kubernetes_spec import Kind, KubernetesSpec, RunVolume
from orchestrator.contract.submission_payload import Handover
from orchestrator.errors import BackendError, Unsettled
from orchestrator.seams import Completed
from orchestrator.system import SystemClock
from tests.backends.kubernetes.rendered import CPU, a_handover
from tests.kubernetes.e2e.person import SLEEPS, Person, advised
from tests.kubernetes.testbed import KubeTestbed
from tests.manifests.examples import ROOT

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

KINDS: tuple[Kind, ...] = ("pytorchjob", "jobset", "trainjob")
BESIDE = "configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies"
MADE = f"{BESIDE},pytorchjobs,jobsets,trainjobs,trainingruntimes"
ROLE = next(yaml.safe_load_all((ROOT / "manifests" / "base" / "user.yaml").read_text()))["rules"]


def handover(namespace: str, kind: Kind = "pytorchjob") -> Handover:
    """Of a job whose pods can never be: nothing but objects is looked at."""
    runs = RunVolume(host_path="/nowhere")
    never = replace(CPU, namespace=namespace, node_selector={"no": "such-node"}, runs=runs)
    return a_handover(never, kind)


def without(right: Right) -> list[dict[str, Any]]:
    """The Role of manifests/base, less one verb."""
    rules = []
    for rule in copy.deepcopy(ROLE):
        name = right.resource.plural + (f"/{right.sub}" if right.sub else "")
        if right.resource.group not in rule["apiGroups"] or name not in rule["resources"]:
            rules.append(rule)
            continue
        others = [one for one in rule["resources"] if one != name]
        rules += [{**rule, "resources": others}] if others else []
        if verbs := [verb for verb in rule["verbs"] if verb != right.verb]:
            rules.append({**rule, "resources": [name], "verbs": verbs})
    return rules


def left(kube: KubeTestbed, namespace: str) -> list[str]:
    """Objects of the job."""
    said = kube.kubectl("-n", namespace, "get", MADE, "-l", "ndctl.dev/job=job", "-o", "name")
    return said.split()


def unowned(kube: KubeTestbed, namespace: str) -> list[str]:
    """Objects of the job that nothing takes away: neither it nor its ConfigMap."""
    return [
        f"{kind}/{item['metadata']['name']}"
        for kind in (*BESIDE.split(","), "trainingruntimes")
        for item in kube.objects(kind, namespace, "ndctl.dev/job=job")
        if not item["metadata"].get("ownerReferences")
    ]


def refusal_of(backend: KubernetesBackend, asked: Handover) -> str:
    """Of a submission that nothing was asked before; empty where it went through."""
    try:
        backend.submit(asked)
    except Forbidden as exc:
        return exc.message
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_missing_right_is_named_first_and_nothing_is_created(
    kube: KubeTestbed, kind: Kind
) -> None:
    """And where it is not asked beforehand, what was made is taken away again."""
    namespace, asked = kube.namespace(f"rights-{kind}"), handover(f"rights-{kind}", kind)
    rights = needed(KubernetesSpec(kind=kind))
    assert {right.need for right in rights} == {"submit", "again", "look"}
    for right in rights:
        environ = {"KUBECONFIG": str(kube.as_user(without(right), namespace))}
        backend = KubernetesBackend(environ, SystemClock())
        if right.need == "submit":
            with pytest.raises(BackendError) as refused:
                backend.check(asked)
            assert f"dev may not {right.verb} {right.word} in namespace" in refused.value.message
            assert f"verbs: [{right.verb}]" in refused.value.message
            assert "YOU" not in refused.value.message
            said = refusal_of(backend, asked)
            if said:
                assert "dev may not" in said
                kube.wait_for(f"nothing without {right}", lambda: not left(kube, namespace))
                continue
            # A dry run patches, and what is taken back is deleted.
            assert right.verb in ("patch", "delete"), right
            assert unowned(kube, namespace) == [], right
        else:
            backend.check(asked)
            backend.submit(asked)
            assert unowned(kube, namespace) == []
        kube.kubectl("-n", namespace, "delete", JOB_KINDS[kind].resource.word, "job")
        kube.kubectl("-n", namespace, "delete", "configmap", "job-launch", "--ignore-not-found")
        kube.wait_for(f"the collector, {right}", lambda: not left(kube, namespace))


class Meddled(Api):
    """Of a command in whose middle something happens: before the creation of the object with that
    number, or after it."""

    def __init__(
        self, environ: Mapping[str, str], at: int, after: bool, happens: Callable[[], None]
    ) -> None:
        super().__init__(None, environ, Hurried())
        self.at, self.after, self.happens = at, after, happens
        self.creations = 0

    def create(self, item: Object, namespace: str) -> Object:
        if item["kind"] == "SelfSubjectAccessReview":
            return super().create(item, namespace)
        self.creations += 1
        its_turn = self.creations == self.at
        if its_turn and not self.after:
            self.happens()
        found = super().create(item, namespace)
        if its_turn and self.after:
            self.happens()
        return found


class Hurried(SystemClock):
    """What is waited for is over sooner here."""

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.2))


def submission(run_root: Path, namespace: str) -> submit_job.Submission:
    overrides = [
        *("cluster.kubernetes.gpu_resource=null", f"cluster.kubernetes.namespace={namespace}"),
        *("cluster.kubernetes.runs={host_path: /nowhere}", "name=job"),
        "cluster.kubernetes.node_selector={no: such-node}",
    ]
    spec = ROOT / "examples" / "kubernetes.yaml"
    planned = plans.plan_spec(spec, overrides, {}, purpose="render")
    return submit_job.Submission(planned=planned, run_root=run_root)


JOB = 7
"""Which object is the job: after ConfigMap, account, Role, binding, policy and Secret."""


@pytest.mark.parametrize(
    ("at", "after", "then"),
    [
        (1, True, "submit"),
        (4, False, "cancel"),
        (JOB, False, "submit"),
        (JOB, True, "cancel"),
    ],
)
def test_the_api_server_is_lost_during_a_submission(
    kube: KubeTestbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    after: bool,
    then: str,
) -> None:
    """The command fails, or has done its work; it is known here, and the next one goes on."""
    namespace = kube.namespace(f"lost-{at}-{after}".lower())
    environ = {"KUBECONFIG": str(kube.kubeconfig)}
    made = at == JOB and after
    api = Meddled(environ, at, after, kube.stop_control_plane)
    asked = submission(tmp_path, namespace)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(KubernetesBackend, "api", lambda self, spec: api)
            if made:
                submit_job.submit(asked, environ, Hurried())
            else:
                with pytest.raises(Unsettled) as lost:
                    submit_job.submit(asked, environ, Hurried())
    finally:
        kube.start_control_plane()
    assert api.creations >= at
    if not made:
        assert "was submitted only partly" in lost.value.message
        assert "seen of it: ConfigMap job-launch" in lost.value.message
    assert len(known_mirrors(tmp_path, "job")) == 1
    kube.wait_for("the API server", lambda: kube.get("namespaces", namespace))
    ours = ["configmaps/job-launch"]
    assert unowned(kube, namespace) == ours, "all else belongs to it"

    ndctl = Ndctl(kube, tmp_path)
    listed = ndctl("list")
    assert "job" in listed.out, listed.err
    if then == "cancel":
        done = ndctl("cancel", "job")
        assert done.code == 0, done.err
        if made:
            kube.kubectl("-n", namespace, "delete", "pytorchjob,configmap", "--all")
        kube.wait_for("nothing", lambda: not left(kube, namespace))
        return
    submit_job.submit(asked, environ, Hurried())
    assert unowned(kube, namespace) == []
    kube.kubectl("-n", namespace, "delete", "pytorchjob", "job")
    kube.wait_for("the collector", lambda: not left(kube, namespace))


@dataclass(frozen=True)
class Ndctl:
    """At a terminal of the cluster's admin."""

    kube: KubeTestbed
    run_root: Path

    def __call__(self, *words: str) -> Completed:
        argv = [sys.executable, "-m", "orchestrator", *words, "--run-root", str(self.run_root)]
        return self.kube(argv)


def test_all_missing_rights_are_named_at_once_and_no_job_is_recorded(
    kube: KubeTestbed, tmp_path: Path
) -> None:
    """By name, with what an administrator adds, which works as it is typed."""
    namespace = kube.namespace("told")
    few = [rule for rule in ROLE if "secrets" not in rule["resources"]]
    few = [rule for rule in few if "networkpolicies" not in rule["resources"]]
    person = Person(tmp_path, kube, namespace, kube.as_user(few, namespace))
    options = {"service_account": "", "pod_template": SLEEPS}
    refused = person.submit(**options)
    assert refused.code == exit_codes.BACKEND, refused.out
    assert "dev may not create secrets, create/patch networkpolicies.networking.k8s.io" in (
        refused.err
    )
    assert '- {apiGroups: [""], resources: [secrets], verbs: [create]}' in refused.err
    assert person("list").out.count("e2e") == 0
    assert left(kube, namespace) == []

    for command in advised(refused.err):
        kube.kubectl(*command[1:])
    person.submitted(**options)
    kube.wait_for("its pods", lambda: len(person.pods()) == 2)
