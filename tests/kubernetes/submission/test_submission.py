"""Submissions to a real API server with a missing right, and with the server lost halfway.

In each case there is either a whole job that is recorded locally, or nothing.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from orchestrator.app.planning import plans
from orchestrator.app.submission import payload, submit_job
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
OTHER_KINDS = "configmaps,secrets,serviceaccounts,roles,rolebindings,networkpolicies"
ALL_KINDS = f"{OTHER_KINDS},pytorchjobs,jobsets,trainjobs,trainingruntimes"
ROLE = next(yaml.safe_load_all((ROOT / "manifests" / "base" / "user.yaml").read_text()))["rules"]


def handover(namespace: str, kind: Kind = "pytorchjob") -> Handover:
    """A job whose pods are never scheduled: the tests look at objects only."""
    runs = RunVolume(host_path="/nowhere")
    never = replace(CPU, namespace=namespace, node_selector={"no": "such-node"}, runs=runs)
    return a_handover(never, kind)


def without(right: Right) -> list[dict[str, Any]]:
    """The rules of the Role in manifests/base without one verb."""
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


def remaining_objects(kube: KubeTestbed, namespace: str) -> list[str]:
    """Names of the job's objects that exist."""
    output = kube.kubectl(
        "-n", namespace, "get", ALL_KINDS, "-l", "ndctl.dev/job=job", "-o", "name"
    )
    return output.split()


def unowned(kube: KubeTestbed, namespace: str) -> list[str]:
    """Objects of the job without an owner, which the garbage collector never deletes."""
    return [
        f"{kind}/{item['metadata']['name']}"
        for kind in (*OTHER_KINDS.split(","), "trainingruntimes")
        for item in kube.objects(kind, namespace, "ndctl.dev/job=job")
        if not item["metadata"].get("ownerReferences")
    ]


def refusal_of(backend: KubernetesBackend, asked: Handover) -> str:
    """The refusal of a submission without a check before it; empty if it succeeds."""
    try:
        backend.submit(asked)
    except Forbidden as exc:
        return exc.message
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_every_missing_right_is_named_first_and_nothing_is_created(
    kube: KubeTestbed, kind: Kind
) -> None:
    """A submission without the check deletes what it created."""
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
            output = refusal_of(backend, asked)
            if output:
                assert "dev may not" in output
                kube.wait_for(
                    f"nothing without {right}", lambda: not remaining_objects(kube, namespace)
                )
                continue
            # The submission itself needs neither: a dry run patches, and a rollback deletes.
            assert right.verb in ("patch", "delete"), right
            assert unowned(kube, namespace) == [], right
        else:
            backend.check(asked)
            backend.submit(asked)
            assert unowned(kube, namespace) == []
        kube.kubectl("-n", namespace, "delete", JOB_KINDS[kind].resource.word, "job")
        kube.kubectl("-n", namespace, "delete", "configmap", "job-launch", "--ignore-not-found")
        kube.wait_for(f"the collector, {right}", lambda: not remaining_objects(kube, namespace))


class InterruptingApi(Api):
    """An API client that calls `happens` before or after it creates object number `at`."""

    def __init__(
        self, environ: Mapping[str, str], at: int, after: bool, interrupt: Callable[[], None]
    ) -> None:
        super().__init__(None, environ, FastClock())
        self.at, self.after, self.interrupt = at, after, interrupt
        self.creations = 0

    def create(self, item: Object, namespace: str) -> Object:
        if item["kind"] == "SelfSubjectAccessReview":
            return super().create(item, namespace)
        self.creations += 1
        is_due = self.creations == self.at
        if is_due and not self.after:
            self.interrupt()
        found = super().create(item, namespace)
        if is_due and self.after:
            self.interrupt()
        return found


class FastClock(SystemClock):
    """A clock that sleeps 0.2 s at most."""

    def sleep(self, seconds: float) -> None:
        super().sleep(min(seconds, 0.2))


def submission(run_root: Path, namespace: str) -> payload.Submission:
    overrides = [
        *("cluster.kubernetes.gpu_resource=null", f"cluster.kubernetes.namespace={namespace}"),
        *("cluster.kubernetes.runs={host_path: /nowhere}", "name=job"),
        "cluster.kubernetes.node_selector={no: such-node}",
    ]
    spec = ROOT / "examples" / "kubernetes.yaml"
    planned = plans.plan_spec(spec, overrides, {}, purpose="render")
    return payload.Submission(planned=planned, run_root=run_root)


JOB = 8
"""Number of the job object: two ConfigMaps, account, Role, binding, policy and Secret are first."""


@pytest.mark.parametrize(
    ("at", "after", "next_command"),
    [(1, True, "submit"), (4, False, "cancel"), (JOB, False, "submit"), (JOB, True, "cancel")],
)
def test_the_api_server_is_lost_during_a_submission(
    kube: KubeTestbed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    after: bool,
    next_command: str,
) -> None:
    """The command fails or succeeds; in both cases the job is recorded, and the next command works
    on it."""
    namespace = kube.namespace(f"lost-{at}-{after}".lower())
    environ = {"KUBECONFIG": str(kube.kubeconfig)}
    job_exists = at == JOB and after
    api = InterruptingApi(environ, at, after, kube.stop_control_plane)
    asked = submission(tmp_path, namespace)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(KubernetesBackend, "api", lambda self, spec: api)
            if job_exists:
                submit_job.submit(asked, environ, FastClock())
            else:
                with pytest.raises(Unsettled) as lost:
                    submit_job.submit(asked, environ, FastClock())
    finally:
        kube.start_control_plane()
    assert api.creations >= at
    if not job_exists:
        assert "was submitted only partly" in lost.value.message
        assert "found: ConfigMap job-launch" in lost.value.message
    assert len(known_mirrors(tmp_path, "job")) == 1
    kube.wait_for("the API server", lambda: kube.get("namespaces", namespace))
    ours = ["configmaps/job-launch"]
    assert unowned(kube, namespace) == ours, "it owns everything else"

    ndctl = Ndctl(kube, tmp_path)
    listed = ndctl("list")
    assert "job" in listed.out, listed.err
    if next_command == "cancel":
        done = ndctl("cancel", "job")
        assert done.code == 0, done.err
        if job_exists:
            kube.kubectl("-n", namespace, "delete", "pytorchjob,configmap", "--all")
        kube.wait_for("nothing", lambda: not remaining_objects(kube, namespace))
        return
    submit_job.submit(asked, environ, FastClock())
    assert unowned(kube, namespace) == []
    kube.kubectl("-n", namespace, "delete", "pytorchjob", "job")
    kube.wait_for("the collector", lambda: not remaining_objects(kube, namespace))


@dataclass(frozen=True)
class Ndctl:
    """`ndctl` at a terminal of the cluster's admin."""

    kube: KubeTestbed
    run_root: Path

    def __call__(self, *words: str) -> Completed:
        argv = [sys.executable, "-m", "orchestrator", *words, "--run-root", str(self.run_root)]
        return self.kube(argv)


def test_all_missing_rights_are_named_at_once_and_no_job_is_recorded(
    kube: KubeTestbed, tmp_path: Path
) -> None:
    """The error names each right and the commands that add it; these commands work as printed."""
    namespace = kube.namespace("told")
    rules = [rule for rule in ROLE if "secrets" not in rule["resources"]]
    rules = [rule for rule in rules if "networkpolicies" not in rule["resources"]]
    person = Person(tmp_path, kube, namespace, kube.as_user(rules, namespace))
    options = {"service_account": "", "pod_template": SLEEPS}
    refused = person.submit(**options)
    assert refused.code == exit_codes.BACKEND, refused.out
    assert "dev may not create secrets, create/patch networkpolicies.networking.k8s.io" in (
        refused.err
    )
    assert '- {apiGroups: [""], resources: [secrets], verbs: [create]}' in refused.err
    assert person("list").out.count("e2e") == 0
    assert remaining_objects(kube, namespace) == []

    for command in advised(refused.err):
        kube.kubectl(*command[1:])
    person.submit_successfully(**options)
    kube.wait_for("its pods", lambda: len(person.pods()) == 2)
