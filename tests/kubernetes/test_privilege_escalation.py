"""A training program cannot exceed the rights of its pod's account, tested on a real API server.

It cannot use another account, read a Secret or change another job. It also cannot make the
controller do so, which has more rights and carries out requests of pods.
"""

import base64
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPSConnection
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from orchestrator.backends.kubernetes.render import names, objects, text
from orchestrator.backends.kubernetes.resources import JOB_KINDS, owner_reference
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


def submit_job(kube: KubeTestbed, kind: Kind, job: str) -> list[Object]:
    """Creates the objects of a job as a user of group `ndctl-users`; the pods only sleep."""
    sleeps = {"spec": {"containers": [{"name": "pytorch", "command": SLEEPS, "resources": None}]}}
    if kind == "trainjob":
        sleeps["spec"]["containers"][0]["name"] = "node"
    runs = RunVolume(host_path=str(kube.runs))
    spec = replace(PLAIN, kind=kind, namespace=NAMESPACE, gpu_resource=None, shm=None, runs=runs)
    launch = a_launch(replace(spec, pod_template=sleeps), hosts=2, job=job)
    objects_of_job = objects(handover_of(launch, backend="kubernetes", stop_grace=1.0))
    file = kube.folder / f"{job}.yaml"
    file.write_text(text(objects_of_job))
    done = kube(["kubectl", *PERSON, "apply", "-f", str(file)])
    assert done.code == 0, done.err
    return objects_of_job


@pytest.fixture
def shared(kube: KubeTestbed) -> KubeTestbed:
    """A namespace of several users with the Secret of one of them."""
    kube.kubectl("apply", "-k", str(ROOT / "manifests" / "overlays" / "rdma"))
    kube.wait_for("its account", lambda: kube.get("serviceaccounts", "default", NAMESPACE))
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "other-teams"}}
    kube.apply({**secret, "stringData": {"key": SECRET}}, namespace=NAMESPACE)
    return kube


@dataclass(frozen=True)
class Account:
    """The ServiceAccount of a pod, used by impersonation."""

    kube: KubeTestbed
    name: str

    @property
    def impersonated(self) -> tuple[str, ...]:
        groups = (f"system:serviceaccounts:{NAMESPACE}", "system:serviceaccounts")
        user = f"system:serviceaccount:{NAMESPACE}:{self.name}"
        return (f"--as={user}", *(f"--as-group={one}" for one in groups))

    def kubectl(self, *words: str) -> str:
        """`done`, `no` if it is forbidden, or the error."""
        done = self.kube(["kubectl", "-n", NAMESPACE, *self.impersonated, *words])
        output = done.err.strip()
        return "done" if done.code == 0 else "no" if "orbidden" in output else output


PRINT_THE_SECRET = {
    "command": ["sh", "-c", "echo stolen: $STOLEN; sleep 600"],
    "env": [
        {"name": "STOLEN", "valueFrom": {"secretKeyRef": {"name": "other-teams", "key": "key"}}}
    ],
}


def with_theft(template: Object) -> Object:
    """The template, changed so that the pod prints the Secret and uses another account."""
    (container,) = template["spec"]["containers"]
    spec = {
        **template["spec"],
        "serviceAccountName": "default",
        "containers": [{**container, **PRINT_THE_SECRET}],
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
    """A template may name any account and any Secret of its namespace. An account that can change a
    template and cause a new pod could therefore read all Secrets and act as every account there."""
    kube, account = shared, Account(shared, "victim-pods")
    objects_of_job = submit_job(kube, kind, "victim")
    kube.wait_for("its pods", lambda: len(running(kube)) == 2)
    before = running(kube)
    for item in objects_of_job:
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
        output = kube.kubectl("logs", pod["metadata"]["name"], "-n", NAMESPACE)
        assert SECRET not in output


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
FORBIDDEN, EXISTING_NAME = 403, "default"


@dataclass(frozen=True)
class Token:
    """The token of an account, as it is mounted in its pods."""

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
        output = json.loads(kube.kubectl("create", "--raw", place, "-f", str(file)))
        tls = ssl.create_default_context(cadata=authority)
        where = config["server"].rpartition("/")[2]
        line = HTTPSConnection(where, context=tls, timeout=60)
        return cls(line, output["status"]["token"])

    def may(self, verb: str, where: str) -> bool:
        """Tries the request as a dry run."""
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
    """All resources of this API server: path of the group, plural with subresource, and whether it
    has a namespace."""
    groups = json.loads(kube.kubectl("get", "--raw", "/apis"))["groups"]
    roots = ["/api/v1", *(f"/apis/{one['preferredVersion']['groupVersion']}" for one in groups)]
    for root in roots:
        for one in json.loads(kube.kubectl("get", "--raw", root))["resources"]:
            yield root, one["name"], one["namespaced"]


def requests(kube: KubeTestbed, named: Sequence[str]) -> Iterator[tuple[str, str, str, str, str]]:
    """Every verb on every resource: verb, path of the group, plural, name and whole path."""
    for root, what, inside in resources(kube):
        resource, _, sub = what.partition("/")
        place = f"{root}/namespaces/{NAMESPACE}" if inside else root
        for verb in VERBS:
            has_no_name = verb not in NAMED and not sub
            for name in [""] if has_no_name else named:
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


RIGHTS_OF_EVERY_ACCOUNT = [
    {
        "apiGroups": ["authorization.k8s.io"],
        "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"],
        "verbs": ["create"],
    }
]
"""Kubernetes lets every account ask for its own rights."""


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_pods_have_exactly_the_rights_of_the_table(shared: KubeTestbed, kind: Kind) -> None:
    """The table is in docs/kubernetes.md; another test compares it with the Role used here."""
    kube = shared
    kube.kubectl(
        "apply", "-f", str(ROOT / "manifests" / "controller" / "account.yaml"), *IN_NAMESPACE
    )
    mine, theirs = submit_job(kube, kind, "victim"), submit_job(kube, kind, "theirs")
    (role,) = (one for one in mine if one["kind"] == "Role")
    base = yaml.safe_load_all((ROOT / "manifests" / "base" / "job.yaml").read_text())
    nodes = next(iter(base))["rules"]
    lease = [{"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]}]
    lease[0]["resourceNames"] = ["ndctl-controller"]
    rules = [*role["rules"], *nodes, *lease, *RIGHTS_OF_EVERY_ACCOUNT]
    own = [*names.pytorchjob_pods("victim", 2), "victim-node-0-0-abcde"]
    tried = {one["metadata"]["name"] for one in (*mine, *theirs)} | {*own, EXISTING_NAME}
    tried |= {"theirs-master-0", "other-teams", "ndctl-controller", "victim-token"}
    token = Token.of(kube, "victim-pods")
    differing = []
    with closing(token.line):
        for verb, root, what, name, where in requests(kube, sorted(tried)):
            if token.may(verb, where) != allowed(rules, verb, root, what, name):
                differing.append(f"{verb} {where}")
    assert differing == []


IN_NAMESPACE = ("-n", NAMESPACE)
HOSTILE_ANNOTATIONS = (
    {"ndctl.dev/gang-restart": '{"spec": {"template": {"spec": {"serviceAccountName": "a"}}}}'},
    {"ndctl.dev/gang-restart": '{"by": "x\\u001b[2J", "exclude": []}'},
    {"ndctl.dev/avoid": "node1,../../secrets"},
    {"ndctl.dev/avoid": ",".join(f"n{number}" for number in range(200))},
    {"ndctl.dev/excluded": "node1", "ndctl.dev/suspended-by": "me", "ndctl.dev/controller": "x"},
)


def test_the_controller_does_for_pods_what_its_grammar_allows_and_nothing_else(
    shared: KubeTestbed,
) -> None:
    """A pod can write anything into the one object that it may change."""
    kube, account = shared, Account(shared, "victim-pods")
    submit_job(kube, "pytorchjob", "victim")
    submit_job(kube, "pytorchjob", "theirs")
    for job in ("victim", "theirs"):
        kube.wait_for("pods", partial(lambda job: len(running(kube, job)) == 2, job))
        set_owner(kube, job)
    template = templates_of(kube, "victim")
    before = {job: templates_of(kube, job) for job in ("victim", "theirs")}
    theirs = kube.get("pods", "theirs-worker-0", NAMESPACE)["metadata"]["uid"]
    annotations = (*HOSTILE_ANNOTATIONS, {"ndctl.dev/end-pods": f"theirs-worker-0/{theirs}"})
    argv = [sys.executable, "-m", "orchestrator", "controller", *IN_NAMESPACE]
    with (
        (kube.folder / "controller.log").open("w") as log,
        subprocess.Popen(argv, env=kube.environ, cwd=ROOT, stderr=log) as controller,
    ):
        try:
            for notes in annotations:
                refused = num_refused(kube)
                change = json.dumps({"metadata": {"annotations": notes}})
                assert (
                    account.kubectl(
                        "patch", "configmap", "victim-launch", "--type=merge", "-p", change
                    )
                    == "done"
                )
                if "ndctl.dev/excluded" not in notes:
                    kube.wait_for(str(notes), partial(lambda n: num_refused(kube) > n, refused))
                gone = json.dumps({"metadata": {"annotations": dict.fromkeys(notes)}})
                account.kubectl("patch", "configmap", "victim-launch", "--type=merge", "-p", gone)
            assert {job: templates_of(kube, job) for job in before} == before
            # An allowed request is carried out, for that job only.
            request = json.dumps({"metadata": {"annotations": {"ndctl.dev/avoid": "node1"}}})
            account.kubectl("patch", "configmap", "victim-launch", "--type=merge", "-p", request)
            kube.wait_for("node1", lambda: "node1" in json.dumps(templates_of(kube, "victim")))
        finally:
            controller.terminate()
    changed = json.loads(json.dumps(templates_of(kube, "victim")))
    for one, original in zip(changed, template, strict=True):
        one["spec"]["affinity"].pop("nodeAffinity")
        assert one == original, "only the node affinity may change"
    assert templates_of(kube, "theirs") == before["theirs"]
    assert kube.get("pods", "theirs-worker-0", NAMESPACE)["metadata"]["uid"] == theirs
    assert "\x1b" not in log_of(kube)
    found = kube.get("pytorchjobs", "victim", NAMESPACE)["metadata"]["annotations"]
    assert found["ndctl.dev/controller"] == NAMESPACE, "the controller writes its notes on the job"


def num_refused(kube: KubeTestbed) -> int:
    return log_of(kube).count("have an invalid request")


def set_owner(kube: KubeTestbed, job: str) -> None:
    """Sets the owner of the job's ConfigMap; usually the leader's pod does, but here it sleeps."""
    about = kube.get("pytorchjobs", job, NAMESPACE)
    owner = owner_reference(JOB_KINDS["pytorchjob"].resource, about)
    change = json.dumps({"metadata": {"ownerReferences": [owner]}})
    kube.kubectl("patch", "configmap", f"{job}-launch", *IN_NAMESPACE, "--type=merge", "-p", change)


def templates_of(kube: KubeTestbed, job: str) -> list[Object]:
    return list(templates(kube.get("pytorchjobs", job, NAMESPACE)["spec"]))


def log_of(kube: KubeTestbed) -> str:
    return (kube.folder / "controller.log").read_text()
