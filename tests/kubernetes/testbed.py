"""A real Kubernetes control plane for tests, with stand-ins for kubelets and operators.

`kube` is the cluster that tests share, one after the other, put in order before each: 4 nodes x 2
GPUs in 2 racks. A test that needs another shape says `with running_testbed(Shape(nodes=16)) as
testbed:`. Both leave nothing behind. Tests with either carry `pytestmark = pytest.mark.kubernetes`,
and are skipped, loudly, where there is no control plane.
"""

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import kubernetes
import pytest
import yaml

from orchestrator.seams import Completed
from tests.kubernetes import real_operators
from tests.kubernetes.provision import NOT_RUN, assets, why_no_control_plane
from tests.kubernetes.standins import nodes
from tests.kubernetes.standins.api import GROUPS, admin_of, path
from tests.kubernetes.standins.nodes import Shape
from tests.testbeds import TestbedError, run_within, wait_until

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "manifests" / "testbed" / "kube_control_plane.sh"
CRDS = (
    "pytorchjobs-v1.9.4",
    "jobsets-v0.12.0",
    "trainer-trainjobs-v2.0.0",
    "trainer-trainingruntimes-v2.0.0",
)
PREFIX = "ndctl-kube-"
WHOLE = ("nodes", "persistentvolumes", "namespaces")
"""Resources of the cluster, not of a namespace."""
SYSTEM = (
    *("default", "kube-system", "kube-public", "kube-node-lease"),
    *(project.namespace for project in real_operators.OPERATORS),
)
GONE_S = 300
"""For what a test left to be gone; a namespace takes some 6 s on a quiet machine."""
START_S = 400
"""For the control plane; 6 s on a machine that has nothing else to do."""
Object = dict[str, Any]


@dataclass
class KubeTestbed:
    folder: Path
    shape: Shape
    binaries: Path
    standins: "subprocess.Popen[bytes] | None" = None
    stays: bool = False
    """When this process ends."""
    operators: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    """The projects' own, where they are at hand."""
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "standins.log"

    @property
    def kubeconfig(self) -> Path:
        """Of the cluster's admin."""
        return self.folder / "kubeconfig"

    @cached_property
    def version(self) -> str:
        """As `Kubernetes v1.20.2`."""
        return run_within([str(self.binaries / "kube-apiserver"), "--version"], {}, 30).out.strip()

    @property
    def minor(self) -> int:
        """The 20 of 1.20."""
        return int(self.version.split(".")[1])

    @property
    def runs(self) -> Path:
        """A directory of this machine, for hostPath volumes."""
        return self.folder / "runs"

    @property
    def nodes(self) -> tuple[str, ...]:
        return nodes.names(self.shape)

    @property
    def environ(self) -> dict[str, str]:
        """For every process that is to use this cluster as its admin."""
        binaries = f"{self.binaries}:{os.environ['PATH']}"
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "PATH": binaries}

    @property
    def client(self) -> "kubernetes.client.ApiClient":
        load = kubernetes.config.new_client_from_config
        made = load(str(self.kubeconfig))  # type: ignore[no-untyped-call]
        assert isinstance(made, kubernetes.client.ApiClient)
        return made

    def start(self) -> None:
        self.runs.mkdir(parents=True, exist_ok=True)
        self._script("start")
        self._start_operators()
        self._start_standins()

    def _start_operators(self) -> None:
        net = self.shape.net
        for project in real_operators.available():
            self.apply(*project.objects(net), namespace=project.namespace)
            self.operators.append(real_operators.start(project, self.folder, net))
            self.wait_for(project.service, partial(self._has_begun, project), START_S)

    def _has_begun(self, project: real_operators.RealOperator) -> bool:
        secret = self.get("secrets", project.secret, project.namespace)
        return real_operators.listens(project, self.folder, self.shape.net, secret)

    def _start_standins(self) -> None:
        ready = self.folder / "run" / "standins.sock"
        ready.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.standins = subprocess.Popen(
                [
                    *(() if self.stays else ("setpriv", "--pdeathsig", "TERM")),
                    *(sys.executable, "-m", "tests.kubernetes.standins", str(self.folder)),
                    json.dumps(asdict(self.shape)),
                    *(project.kind for project in real_operators.available()),
                ],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.wait_for("the stand-ins", lambda: self._alive() and ready.exists(), 120)
        self.wait_for("all nodes ready", self._untainted, 60 + self.shape.nodes / 5)

    def _alive(self) -> bool:
        if self.standins is None or self.standins.poll() is not None:
            raise TestbedError(f"the stand-ins ended: {self.log.read_text()[-2000:]}")
        return True

    def _untainted(self) -> bool:
        items = self.objects("nodes")
        taints = [it for it in items if it["spec"].get("taints") or it["spec"].get("unschedulable")]
        return len(items) == self.shape.nodes and not taints

    def stop(self) -> None:
        """End every process of it."""
        with contextlib.suppress(OSError):
            self.order("end")
        if self.standins is not None:
            try:
                self.standins.wait(20)
            except subprocess.TimeoutExpired:
                self.standins.kill()
                self.standins.wait()
        for operator in self.operators:
            operator.terminate()
            operator.wait()
        self.operators.clear()
        self._script("stop")

    def restart_api_server(self) -> None:
        """And all else of the control plane, on the same data and ports."""
        self._script("restart")

    def stop_control_plane(self) -> None:
        self._script("stop")

    def start_control_plane(self) -> None:
        self._script("start")

    def _script(self, verb: str) -> None:
        crds = " ".join(str(REPOSITORY / "manifests" / "crds" / f"{name}.yaml") for name in CRDS)
        environ = {**os.environ, "KUBEBUILDER_ASSETS": str(self.binaries)}
        environ.setdefault("KUBE_TIMEOUT", str(START_S // 2))
        environ |= real_operators.control_plane_environ(self.shape.net)
        if not (self.folder / "etcd").exists():
            environ["KUBE_CRDS"] = f"{crds} {_cluster_runtimes(self.folder)}"
        done = run_within(["bash", str(SCRIPT), verb, str(self.folder)], environ, START_S)
        if done.code != 0:
            raise TestbedError(f"{SCRIPT.name} {verb}: {done.err or done.out}")

    def compact(self) -> None:
        """etcd forgets its history: a watch from before is answered 410 Gone."""
        port = int((self.folder / "run" / "ports").read_text().split()[1])
        where = f"http://127.0.0.1:{port}/v3/kv"
        now = _post(f"{where}/range", {"key": "Lw=="})["header"]["revision"]
        _post(f"{where}/compaction", {"revision": now, "physical": True})

    def order(self, order: str, **what: str) -> Any:
        """Tell the stand-ins something."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(60)
            line.connect(str(self.folder / "run" / "standins.sock"))
            line.sendall(json.dumps({"order": order, **what}).encode() + b"\n")
            answer = json.loads(line.makefile().read() or '{"said": null}')
        if "error" in answer:
            raise TestbedError(f"{order} {what}: {answer['error']}")
        return answer["said"]

    def lose_node(self, name: str, *, processes_live: bool = False) -> None:
        """It dies, or only its network does; and the node controller has noticed."""
        self.order("lose-node", node=name, processes="live" if processes_live else "dead")
        self.wait_for(f"{name} unreachable", lambda: self.get("nodes", name)["spec"].get("taints"))

    def node_back(self, name: str) -> None:
        self.order("node-back", node=name)

    def imageless(self, *nodes: str) -> None:
        """These, and no others, can pull no image."""
        self.order("imageless", nodes=",".join(nodes))

    def pids(self, pod: str, namespace: str = "default") -> list[int]:
        """Processes of a pod, as this machine numbers them; the container's first comes first."""
        found: list[int] = self.order("pids", pod=f"{namespace}/{pod}")
        return found

    def oom(self, pod: str, namespace: str = "default") -> None:
        self.order("oom", pod=f"{namespace}/{pod}")

    def evict(self, pod: str, namespace: str = "default") -> None:
        self.order("evict", pod=f"{namespace}/{pod}")

    def __call__(self, argv: Sequence[str], /, *, timeout: float = 120) -> Completed:
        """A command as this cluster's admin, as the `Shell` of our own code."""
        return run_within(argv, self.environ, timeout)

    def kubectl(self, *argv: str, timeout: float = 120) -> str:
        """What it printed. Raises TestbedError when it fails."""
        cache = ("--cache-dir", str(self.folder / "run" / "kubectl-cache"))
        done = self([str(self.binaries / "kubectl"), *cache, *argv], timeout=timeout)
        if done.code != 0:
            raise TestbedError(f"kubectl {' '.join(argv)}: {done.code} {done.err or done.out}")
        return done.out.strip()

    def apply(self, *objects: Object, namespace: str = "default") -> None:
        """Created as they are; they must not exist."""
        text = yaml.safe_dump_all(objects)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=self.folder) as file:
            file.write(text)
            file.flush()
            self.kubectl("create", "--validate=false", "-n", namespace, "-f", file.name)

    def get(self, resource: str, name: str, namespace: str = "default") -> Object:
        if resource in GROUPS:
            return self._read(path(resource, self._space(resource, namespace), name))
        text = self.kubectl("get", resource, name, "-n", namespace, "-o", "json")
        found: Object = json.loads(text)
        return found

    def objects(
        self, resource: str, namespace: str = "default", selector: str = ""
    ) -> list[Object]:
        """In all namespaces: `namespace=""`."""
        query = f"?labelSelector={quote(selector)}" if selector else ""
        if resource in GROUPS:
            where = path(resource, self._space(resource, namespace)) + query
            listed: list[Object] = self._read(where)["items"]
            return listed
        text = self.kubectl("get", resource, "-n", namespace, "-l", selector, "-o", "json")
        found: list[Object] = json.loads(text)["items"]
        return found

    @staticmethod
    def _space(resource: str, namespace: str) -> str:
        return "" if resource in WHOLE else namespace

    @cached_property
    def _line(self) -> tuple[str, ssl.SSLContext]:
        return admin_of(self.kubeconfig)

    def _read(self, where: str) -> Object:
        """Without kubectl, whose start costs a polling test more than the answer."""
        server, tls = self._line
        try:
            with urllib.request.urlopen(server + where, timeout=30, context=tls) as answer:
                found: Object = json.load(answer)
        except urllib.error.HTTPError as exc:
            with exc:
                raise TestbedError(f"{where}: {exc.code} {exc.read().decode()[:300]}") from exc
        except OSError as exc:
            raise TestbedError(f"{where}: {exc}") from exc
        return found

    def phases(self, selector: str = "", namespace: str = "default") -> dict[str, str]:
        pods = self.objects("pods", namespace, selector)
        return {it["metadata"]["name"]: it["status"].get("phase", "Pending") for it in pods}

    def conditions(self, resource: str, name: str, namespace: str = "default") -> list[str]:
        """Those that hold, the newest last."""
        held = self.get(resource, name, namespace).get("status", {}).get("conditions", [])
        return [each["type"] for each in held if each["status"] == "True"]

    def as_user(
        self, rules: Sequence[Object], namespace: str = "default", *, user: str = "dev"
    ) -> Path:
        """A kubeconfig for somebody with these rights (a Role's rules) in the namespace alone."""
        name, version = f"may-{user}", {"apiVersion": "rbac.authorization.k8s.io/v1"}
        role = {**version, "kind": "Role", "metadata": {"name": name}, "rules": list(rules)}
        subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
        ref = {"kind": "Role", "name": name, "apiGroup": "rbac.authorization.k8s.io"}
        bound = {**version, "kind": "RoleBinding", "metadata": {"name": name}}
        self.kubectl("delete", "role,rolebinding", name, "-n", namespace, "--ignore-not-found")
        self.apply(role, {**bound, "subjects": [subject], "roleRef": ref}, namespace=namespace)
        config = yaml.safe_load((self.folder / "kubeconfig-user").read_text())
        config["contexts"][0]["context"]["namespace"] = namespace
        place = self.folder / f"kubeconfig-{user}-{namespace}"
        place.write_text(yaml.safe_dump(config))
        return place

    def namespace(self, name: str) -> str:
        """One more, ready for pods."""
        self.kubectl("create", "namespace", name)
        self.wait_for("its account", lambda: self.get("serviceaccounts", "default", name))
        return name

    def wait_for(self, what: str, holds: Callable[[], object], timeout: float = 200) -> None:
        wait_until(what, holds, timeout)

    def restore(self) -> None:
        """As after the start: all nodes up and untainted, no job, pod, claim or namespace of a
        test."""
        if run_within(["bash", str(SCRIPT), "status", str(self.folder)], os.environ, 30).code != 0:
            self._script("restart")
        if self.standins is None or self.standins.poll() is not None:
            self._start_standins()
        for name in self.order("lost"):
            self.node_back(name)
        self.imageless()
        for node in self.objects("nodes"):
            name = node["metadata"]["name"]
            if node["spec"].get("unschedulable"):
                self.kubectl("uncordon", name)
        here = ("-n", "default", "--wait=false")
        self.kubectl("delete", ",".join(LEFTOVERS), "--all", *here)
        self.kubectl("delete", "secrets,serviceaccounts", "-l", OURS, *here)
        if fresh := self._others(going=False):
            self.kubectl("delete", "namespaces", *fresh, "--wait=false")
        self.wait_for("no pods", self._no_pods, GONE_S)
        # What the next test makes in one that is going would go with it.
        self.wait_for("no namespace of a test", lambda: not self._others(), GONE_S)
        self.wait_for("all nodes ready", self._untainted, GONE_S)
        shutil.rmtree(self.runs)
        self.runs.mkdir()

    def _others(self, *, going: bool = True) -> list[str]:
        """Namespaces that tests made; `going`: also those that are being deleted."""
        known = [it["metadata"] for it in self.objects("namespaces")]
        return [
            it["name"]
            for it in known
            if it["name"] not in SYSTEM and (going or "deletionTimestamp" not in it)
        ]

    def _no_pods(self) -> bool:
        """By force: a node that is lost, or none at all, ends none; nor would its namespace go."""
        if not self.objects("pods", ""):
            return True
        force = ("--all", "--grace-period=0", "--force", "--wait=false")
        self.kubectl("delete", "pods", "--all-namespaces", *force)
        return False


OURS = "app.kubernetes.io/part-of=ndctl"
LEFTOVERS = (
    *("pytorchjobs.kubeflow.org", "trainjobs.trainer.kubeflow.org", "jobsets.jobset.x-k8s.io"),
    *("deployments.apps", "configmaps", "resourcequotas", "limitranges", "roles", "rolebindings"),
    *("persistentvolumeclaims", "events", "leases.coordination.k8s.io"),
)


def _post(where: str, body: Object) -> Object:
    done = run_within(
        ["curl", "-sf", "--max-time", "20", "-d", json.dumps(body), where], os.environ, 30
    )
    if done.code != 0:
        raise TestbedError(f"{where}: curl ends with {done.code}")
    answer: Object = json.loads(done.out)
    return answer


def _cluster_runtimes(folder: Path) -> Path:
    """The CRD of ClusterTrainingRuntime: TrainingRuntime's, of the cluster instead."""
    source = REPOSITORY / "manifests" / "crds" / "trainer-trainingruntimes-v2.0.0.yaml"
    text = source.read_text().replace("scope: Namespaced", "scope: Cluster")
    for word in ("trainingruntime", "TrainingRuntime"):
        text = text.replace(f": {word}", f": cluster{word}")
    place = folder / "clustertrainingruntimes.yaml"
    place.write_text(text.replace(": clusterTrainingRuntime", ": ClusterTrainingRuntime"))
    return place


@contextlib.contextmanager
def running_testbed(shape: Shape | None = None) -> Iterator[KubeTestbed]:
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp"))
    # addresses by process id: two testbeds at once rarely meet on one
    own = replace(shape or Shape(), net=16 + os.getpid() % 230)
    testbed = KubeTestbed(folder, own, assets())
    try:
        testbed.start()
        yield testbed
    finally:
        testbed.stop()
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Stop the testbeds of runs that were killed themselves."""
    for folder in Path("/tmp").glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        gone = pid.isdigit() and not Path(f"/proc/{pid}").exists()
        if gone and folder.is_dir() and folder.stat().st_uid == os.getuid():
            KubeTestbed(folder, Shape(), assets()).stop()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def kube_there() -> None:
    """Skips, loudly, without a control plane; for tests that start a testbed of their own."""
    why = why_no_control_plane()
    if why is not None:
        pytest.skip(f"{NOT_RUN}{why}")
    sweep()


@pytest.fixture(scope="session")
def _shared_kube(kube_there: None) -> Iterator[KubeTestbed]:
    with running_testbed() as testbed:
        yield testbed


@pytest.fixture
def kube(_shared_kube: KubeTestbed) -> KubeTestbed:
    """The cluster that tests share, in order; what a test leaves, the next one puts right."""
    _shared_kube.restore()
    return _shared_kube
