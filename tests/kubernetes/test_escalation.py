"""What a training program can do with the account of its pod, tried on a real API server: it takes
no other account, reads no Secret, and touches nothing of another job. Nor by way of the controller,
which has the rights that pods have not, and does what they ask for."""

import base64
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPSConnection
from typing import Any

import pytest
import yaml

from orchestrator.backends.kubernetes.render import names, objects, text
from orchestrator.backends.kubernetes.resources import JOB_KINDS
from orchestrator.backends.kubernetes.submitting import owner_reference
from orchestrator.contract.spec.kubernetes_spec import Kind, RunVolume
from tests.backends.handover import handover_of
from tests.backends.kubernetes.rendered import PLAIN, a_launch
from tests.kubernetes.testbed import KubeTestbed
from tests.manifests.examples import ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]

NAMESPACE = "ndctl"
PERSON = ("--as=ada", "--as-group=ndctl-users", "--as-group=system:authenticated")
SECRET = "TOPSECRET"
SLEEPS = ["sh", "-c", "sleep 600"]
Object = dict[str, Any]


def submitted(kube: KubeTestbed, kind: Kind, job: str) -> list[Object]:
    """Its objects, as somebody of `ndctl-users` makes them; its pods sleep."""
    sleeps = {"spec": {"containers": [{"name": "pytorch", "command": SLEEPS, "resources": None}]}}
    if kind == "trainjob":
        sleeps["spec"]["containers"][0]["name"] = "node"
    runs = RunVolume(host_path=str(kube.runs))
    spec = replace(PLAIN, kind=kind, namespace=NAMESPACE, gpu_resource=None, shm=None, runs=runs)
    launch = a_launch(replace(spec, pod_template=sleeps), hosts=2, job=job)
    made = objects(handover_of(launch, backend="kubernetes", stop_grace=1.0))
    file = kube.folder / f"{job}.yaml"
    file.write_text(text(made))
    done = kube(["kubectl", *PERSON, "apply", "-f", str(file)])
    assert done.code == 0, done.err
    return made


@pytest.fixture
def shared(kube: KubeTestbed) -> KubeTestbed:
    """A namespace of several people, with a Secret that is of one of them alone."""
    kube.kubectl("apply", "-k", str(ROOT / "manifests" / "overlays" / "rdma"))
    kube.wait_for("its account", lambda: kube.get("serviceaccounts", "default", NAMESPACE))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "other-teams"}}
    kube.apply({**secret, "stringData": {"key": SECRET}}, namespace=NAMESPACE)
    return kube


@dataclass(frozen=True)
class Account:
    """Of a pod, as the API server knows it."""

    kube: KubeTestbed
    name: str

    @property
    def impersonated(self) -> tuple[str, ...]:
        groups = (f"system:serviceaccounts:{NAMESPACE}", "system:serviceaccounts")
        user = f"system:serviceaccount:{NAMESPACE}:{self.name}"
        return (f"--as={user}", *(f"--as-group={one}" for one in groups))

    def kubectl(self, *words: str) -> str:
        """`done`, `no`, or what else was said."""
        done = self.kube(["kubectl", "-n", NAMESPACE, *self.impersonated, *words])
        said = done.err.strip()
        return "done" if done.code == 0 else "no" if "orbidden" in said else said


STEAL = {
    "command": ["sh", "-c", "echo stolen: $STOLEN; sleep 600"],
    "env": [
        {
            "name": "STOLEN",
            "valueFrom": {"secretKeyRef": {"name": "other-teams", "key": "key"}},
        }
    ],
}


def with_theft(template: Object) -> Object:
    """The template of a pod that prints the Secret, as another account."""
    (container,) = template["spec"]["containers"]
    spec = {
        **template["spec"],
        "serviceAccountName": "default",
        "containers": [{**container, **STEAL}],
    }
    return {**template, "spec": spec}


def templates(value: Any) -> Iterator[Object]:
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
            return
        for one in value.values():
            yield from templates(one)
    elif isinstance(value, list):
        for one in value:
            yield from templates(one)


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_no_pod_changes_the_template_that_pods_are_made_from(
    shared: KubeTestbed, kind: Kind
) -> None:
    """A template names any account and any Secret of the namespace. An account that may change the
    template and cause a new pod reads all Secrets and has the rights of every account there."""
    kube, account = shared, Account(shared, "victim-pods")
    made = submitted(kube, kind, "victim")
    kube.wait_for("its pods", lambda: len(running(kube)) == 2)
    before = running(kube)
    for item in made:
        changed = json.loads(json.dumps(item))
        found = list(templates(changed))
        for one in found:
            one.update(with_theft(one))
        if not found:
            continue
        file = kube.folder / "stolen.json"
        file.write_text(json.dumps(changed))
        change = json.dumps({"spec": changed["spec"]})
        named = (JOB_KINDS[kind].resource.word, "victim")
        if item["kind"] == "TrainingRuntime":
            named = ("trainingruntimes.trainer.kubeflow.org", "victim")
        assert account.kubectl("patch", *named, "--type=merge", "-p", change) == "no"
        assert account.kubectl("replace", "-f", str(file)) == "no"
        for way in ((), ("--server-side", "--force-conflicts")):
            assert account.kubectl("apply", *way, "-f", str(file)) == "no"
    for name in before:
        account.kubectl("delete", "pod", name, "--wait=false")
    kube.wait_for("its pods again", lambda: len(running(kube)) == 2)
    for pod in kube.objects("pods", NAMESPACE, "ndctl.dev/job=victim"):
        assert pod["spec"]["serviceAccountName"] == "victim-pods"
        said = kube.kubectl("logs", pod["metadata"]["name"], "-n", NAMESPACE)
        assert SECRET not in said


def running(kube: KubeTestbed, job: str = "victim") -> list[str]:
    phases = kube.phases(f"ndctl.dev/job={job}", NAMESPACE)
    return [name for name, phase in phases.items() if phase == "Running"]


VERBS = {
    "get": "GET",
    "list": "GET",
    "watch": "GET",
    "create": "POST",
    "update": "PUT",
    "patch": "PATCH",
    "delete": "DELETE",
    "deletecollection": "DELETE",
}
NAMED = ("get", "update", "patch", "delete")
FORBIDDEN, TAKEN = 403, "default"


@dataclass(frozen=True)
class Token:
    """Of an account, as it lies in its pods."""

    line: HTTPSConnection
    token: str

    @classmethod
    def of(cls, kube: KubeTestbed, account: str) -> "Token":
        config = yaml.safe_load(kube.kubeconfig.read_text())["clusters"][0]["cluster"]
        authority = base64.b64decode(config["certificate-authority-data"]).decode()
        place = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        file = kube.folder / "request.json"
        asks = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        file.write_text(json.dumps({**asks, "metadata": {}}))
        said = json.loads(kube.kubectl("create", "--raw", place, "-f", str(file)))
        tls = ssl.create_default_context(cadata=authority)
        where = config["server"].rpartition("/")[2]
        line = HTTPSConnection(where, context=tls, timeout=60)
        return cls(line, said["status"]["token"])

    def may(self, verb: str, where: str) -> bool:
        """Tried, without effect where it is allowed."""
        query = "dryRun=All"
        if VERBS[verb] == "GET":
            query = "watch=true&timeoutSeconds=1" if verb == "watch" else "limit=1"
        content = "application/merge-patch+json" if verb == "patch" else "application/json"
        body = b"{}" if verb in ("create", "update", "patch") else None
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content}
        self.line.request(VERBS[verb], f"{where}?{query}", body, headers)
        answer = self.line.getresponse()
        answer.read()
        return answer.status != FORBIDDEN


def resources(kube: KubeTestbed) -> Iterator[tuple[str, str, bool]]:
    """Path up to the namespace, plural with its subresource, and whether it is in a namespace: of
    all that this API server has."""
    groups = json.loads(kube.kubectl("get", "--raw", "/apis"))["groups"]
    roots = ["/api/v1", *(f"/apis/{one['preferredVersion']['groupVersion']}" for one in groups)]
    for root in roots:
        for one in json.loads(kube.kubectl("get", "--raw", root))["resources"]:
            yield root, one["name"], one["namespaced"]


def requests(kube: KubeTestbed, named: Sequence[str]) -> Iterator[tuple[str, str, str, str, str]]:
    """Every verb on everything: where it is, what it is, its name, and the whole path."""
    for root, what, inside in resources(kube):
        resource, _, sub = what.partition("/")
        place = f"{root}/namespaces/{NAMESPACE}" if inside else root
        for verb in VERBS:
            whole = verb not in NAMED and not sub
            for name in [""] if whole else named:
                yield verb, root, what, name, "/".join(filter(None, (place, resource, name, sub)))


def allowed(rules: list[Object], verb: str, root: str, what: str, name: str) -> bool:
    group = "" if root == "/api/v1" else root.split("/")[2]
    return any(
        verb in rule["verbs"]
        and group in rule["apiGroups"]
        and what in rule["resources"]
        and (not rule.get("resourceNames") or name in rule["resourceNames"])
        for rule in rules
    )


EVERYBODY = [
    {
        "apiGroups": ["authorization.k8s.io"],
        "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"],
        "verbs": ["create"],
    }
]
"""What Kubernetes itself lets every account do: ask what it may."""


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_pods_have_exactly_the_rights_of_the_table(shared: KubeTestbed, kind: Kind) -> None:
    """docs/kubernetes.md has it, and a test compares it with the Role that is looked at here."""
    kube = shared
    kube.kubectl("apply", "-f", str(ROOT / "manifests" / "controller" / "account.yaml"), *IN)
    mine, theirs = submitted(kube, kind, "victim"), submitted(kube, kind, "theirs")
    (role,) = (one for one in mine if one["kind"] == "Role")
    base = yaml.safe_load_all((ROOT / "manifests" / "base" / "job.yaml").read_text())
    nodes = next(iter(base))["rules"]
    lease = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]}]
    lease[0]["resourceNames"] = ["ndctl-controller"]
    rules = [*role["rules"], *nodes, *lease, *EVERYBODY]
    own = [*names.pytorchjob_pods("victim", 2), "victim-node-0-0-abcde"]
    tried = {one["metadata"]["name"] for one in (*mine, *theirs)} | {*own, TAKEN}
    tried |= {"theirs-master-0", "other-teams", "ndctl-controller", "victim-token"}
    token = Token.of(kube, "victim-pods")
    wrong = []
    with closing(token.line):
        for verb, root, what, name, where in requests(kube, sorted(tried)):
            if token.may(verb, where) != allowed(rules, verb, root, what, name):
                wrong.append(f"{verb} {where}")
    assert wrong == []


IN = ("-n", NAMESPACE)
EVIL = (
    {"ndctl.dev/gang-restart": '{"spec": {"template": {"spec": {"serviceAccountName": "a"}}}}'},
    {"ndctl.dev/gang-restart": '{"by": "x\\u001b[2J", "exclude": []}'},
    {"ndctl.dev/avoid": "node1,../../secrets"},
    {"ndctl.dev/avoid": ",".join(f"n{number}" for number in range(200))},
    {"ndctl.dev/excluded": "node1", "ndctl.dev/suspended-by": "me", "ndctl.dev/controller": "x"},
)


def test_the_controller_does_for_pods_what_its_grammar_allows_and_nothing_else(
    shared: KubeTestbed,
) -> None:
    """A pod writes what it likes into the one object that it may write."""
    kube, account = shared, Account(shared, "victim-pods")
    submitted(kube, "pytorchjob", "victim")
    submitted(kube, "pytorchjob", "theirs")
    for job in ("victim", "theirs"):
        kube.wait_for("pods", partial(lambda job: len(running(kube, job)) == 2, job))
        owned(kube, job)
    template = templates_of(kube, "victim")
    before = {job: templates_of(kube, job) for job in ("victim", "theirs")}
    theirs = kube.get("pods", "theirs-worker-0", NAMESPACE)["metadata"]["uid"]
    evil = (*EVIL, {"ndctl.dev/end-pods": f"theirs-worker-0/{theirs}"})
    argv = [sys.executable, "-m", "orchestrator", "controller", *IN]
    with (
        (kube.folder / "controller.log").open("w") as log,
        subprocess.Popen(argv, env=kube.environ, cwd=ROOT, stderr=log) as controller,
    ):
        try:
            for notes in evil:
                said = log_of(kube).count("have an invalid request")
                change = json.dumps({"metadata": {"annotations": notes}})
                assert (
                    account.kubectl(
                        "patch", "configmap", "victim-launch", "--type=merge", "-p", change
                    )
                    == "done"
                )
                if "ndctl.dev/excluded" not in notes:
                    kube.wait_for(
                        str(notes), partial(lambda n: log_of(kube).count("cannot be") > n, said)
                    )
                gone = json.dumps({"metadata": {"annotations": dict.fromkeys(notes)}})
                account.kubectl("patch", "configmap", "victim-launch", "--type=merge", "-p", gone)
            assert {job: templates_of(kube, job) for job in before} == before
            # And what may be asked for is done, of that job alone.
            request = json.dumps({"metadata": {"annotations": {"ndctl.dev/avoid": "node1"}}})
            account.kubectl("patch", "configmap", "victim-launch", "--type=merge", "-p", request)
            kube.wait_for("node1", lambda: "node1" in json.dumps(templates_of(kube, "victim")))
        finally:
            controller.terminate()
    changed = json.loads(json.dumps(templates_of(kube, "victim")))
    for one, original in zip(changed, template, strict=True):
        one["spec"]["affinity"].pop("nodeAffinity")
        assert one == original, "node affinity alone"
    assert templates_of(kube, "theirs") == before["theirs"]
    assert kube.get("pods", "theirs-worker-0", NAMESPACE)["metadata"]["uid"] == theirs
    assert "\x1b" not in log_of(kube)
    found = kube.get("pytorchjobs", "victim", NAMESPACE)["metadata"]["annotations"]
    assert found["ndctl.dev/controller"] == NAMESPACE, "its own notes are on the job"


def owned(kube: KubeTestbed, job: str) -> None:
    """As the leader's pod does, which sleeps here."""
    about = kube.get("pytorchjobs", job, NAMESPACE)
    owner = owner_reference(JOB_KINDS["pytorchjob"].resource, about)
    change = json.dumps({"metadata": {"ownerReferences": [owner]}})
    kube.kubectl("patch", "configmap", f"{job}-launch", *IN, "--type=merge", "-p", change)


def templates_of(kube: KubeTestbed, job: str) -> list[Object]:
    return list(templates(kube.get("pytorchjobs", job, NAMESPACE)["spec"]))


def log_of(kube: KubeTestbed) -> str:
    return (kube.folder / "controller.log").read_text()
