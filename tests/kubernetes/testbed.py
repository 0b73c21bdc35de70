"""A real Kubernetes control plane for tests, with stand-ins for kubelets and operators.

The fixture `kube` is a cluster of 4 nodes x 2 GPUs in 2 racks. Tests share it one after the other;
it is restored before each test. A test that needs another shape uses
`with running_testbed(Shape(nodes=16)) as testbed:`. Both clean up after themselves. Mark such tests
with `pytestmark = pytest.mark.kubernetes`. Without a control plane they are skipped, and the end of
the run lists them.
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
CRDS = {
    "pytorchjobs.kubeflow.org": "pytorchjobs-v1.9.4",
    "jobsets.jobset.x-k8s.io": "jobsets-v0.12.0",
    "trainjobs.trainer.kubeflow.org": "trainer-trainjobs-v2.0.0",
    "trainingruntimes.trainer.kubeflow.org": "trainer-trainingruntimes-v2.0.0",
}
"""Name of a CustomResourceDefinition to its file in `manifests/crds`."""
CLUSTER_RUNTIMES = "clustertrainingruntimes.trainer.kubeflow.org"
PREFIX = "ndctl-kube-"
CLUSTER_SCOPED = ("nodes", "persistentvolumes", "namespaces")
"""Resources that have no namespace."""
SYSTEM_NAMESPACES = (
    *("default", "kube-system", "kube-public", "kube-node-lease"),
    *(operator.namespace for operator in real_operators.OPERATORS),
)
CLEANUP_S = 300
"""Time limit for deleting what a test left; a namespace takes about 6 s on an idle machine."""
START_S = 400
"""Time limit for starting the control plane; it takes 6 s on an idle machine."""
Object = dict[str, Any]


@dataclass
class KubeTestbed:
    folder: Path
    shape: Shape
    binaries: Path
    standins: "subprocess.Popen[bytes] | None" = None
    keep_running: bool = False
    """Whether the stand-ins keep running when this process ends."""
    operators: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    """The projects' own operators, if KUBE_OPERATORS names them."""
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "standins.log"

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the cluster's admin."""
        return self.folder / "kubeconfig"

    @cached_property
    def version(self) -> str:
        """Version in the form `Kubernetes v1.20.2`."""
        return run_within([str(self.binaries / "kube-apiserver"), "--version"], {}, 30).out.strip()

    @property
    def minor_version(self) -> int:
        """Minor version, for example 20 of 1.20."""
        return int(self.version.split(".")[1])

    @property
    def runs(self) -> Path:
        """A directory on this machine for hostPath volumes."""
        return self.folder / "runs"

    @property
    def nodes(self) -> tuple[str, ...]:
        return nodes.names(self.shape)

    @property
    def environ(self) -> dict[str, str]:
        """Environment of a process that uses this cluster as its admin."""
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
        for operator in real_operators.available():
            self.apply(*operator.objects(net), namespace=operator.namespace)
            self.operators.append(real_operators.start(operator, self.folder, net))
            self.wait_for(operator.service, partial(self._is_operator_ready, operator), START_S)

    def _is_operator_ready(self, operator: real_operators.RealOperator) -> bool:
        secret = self.get("secrets", operator.secret, operator.namespace)
        return real_operators.is_ready(operator, self.folder, self.shape.net, secret)

    def _start_standins(self) -> None:
        ready = self.folder / "run" / "standins.sock"
        ready.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.standins = subprocess.Popen(
                [
                    *(() if self.keep_running else ("setpriv", "--pdeathsig", "TERM")),
                    *(sys.executable, "-m", "tests.kubernetes.standins", str(self.folder)),
                    json.dumps(asdict(self.shape)),
                    *(operator.kind for operator in real_operators.available()),
                ],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.wait_for("the stand-ins", lambda: self._alive() and ready.exists(), 120)
        self.wait_for("all nodes ready", self._all_nodes_ready, 60 + self.shape.nodes / 5)

    def _alive(self) -> bool:
        if self.standins is None or self.standins.poll() is not None:
            raise TestbedError(f"the stand-ins exited: {self.log.read_text()[-2000:]}")
        return True

    def _all_nodes_ready(self) -> bool:
        items = self.objects("nodes")
        taints = [it for it in items if it["spec"].get("taints") or it["spec"].get("unschedulable")]
        return len(items) == self.shape.nodes and not taints

    def stop(self) -> None:
        """Ends every process of the testbed."""
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
        """Restarts the whole control plane on the same data and ports."""
        self._script("restart")

    def stop_control_plane(self) -> None:
        self._script("stop")

    def start_control_plane(self) -> None:
        self._script("start")

    def _script(self, verb: str) -> None:
        environ = {**os.environ, "KUBEBUILDER_ASSETS": str(self.binaries)}
        environ.setdefault("KUBE_TIMEOUT", str(START_S // 2))
        environ |= real_operators.control_plane_environ(self.shape.net)
        if not (self.folder / "etcd").exists():
            environ["KUBE_CRDS"] = " ".join(map(str, _definitions(self.folder)))
        done = run_within(["bash", str(SCRIPT), verb, str(self.folder)], environ, START_S)
        if done.code != 0:
            raise TestbedError(f"{SCRIPT.name} {verb}: {done.err or done.out}")

    def compact(self) -> None:
        """Compacts etcd's history, so that an older watch gets 410 Gone."""
        port = int((self.folder / "run" / "ports").read_text().split()[1])
        where = f"http://127.0.0.1:{port}/v3/kv"
        now = _post(f"{where}/range", {"key": "Lw=="})["header"]["revision"]
        _post(f"{where}/compaction", {"revision": now, "physical": True})

    def order(self, order: str, **what: str) -> Any:
        """Sends an order to the stand-ins and returns their answer."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(60)
            line.connect(str(self.folder / "run" / "standins.sock"))
            line.sendall(json.dumps({"order": order, **what}).encode() + b"\n")
            answer = json.loads(line.makefile().read() or '{"result": null}')
        if "error" in answer:
            raise TestbedError(f"{order} {what}: {answer['error']}")
        return answer["result"]

    def lose_node(self, name: str, *, processes_live: bool = False) -> None:
        """The node fails, or only its network; returns when the node controller has noticed."""
        self.order("lose-node", node=name, processes="live" if processes_live else "dead")
        self.wait_for(f"{name} unreachable", lambda: self.get("nodes", name)["spec"].get("taints"))

    def restore_node(self, name: str) -> None:
        self.order("node-back", node=name)

    def block_image_pulls(self, *nodes: str) -> None:
        """From now on, exactly these nodes cannot pull images."""
        self.order("block-image-pulls", nodes=",".join(nodes))

    def pids(self, pod: str, namespace: str = "default") -> list[int]:
        """Process ids of a pod on this machine; the container's first process comes first."""
        found: list[int] = self.order("pids", pod=f"{namespace}/{pod}")
        return found

    def oom(self, pod: str, namespace: str = "default") -> None:
        self.order("oom", pod=f"{namespace}/{pod}")

    def evict(self, pod: str, namespace: str = "default") -> None:
        self.order("evict", pod=f"{namespace}/{pod}")

    def __call__(self, argv: Sequence[str], /, *, timeout: float = 120) -> Completed:
        """Runs a command as the cluster's admin; implements the `Shell` of our own code."""
        return run_within(argv, self.environ, timeout)

    def kubectl(self, *argv: str, timeout: float = 120) -> str:
        """The output of kubectl. Raises TestbedError if it fails."""
        cache = ("--cache-dir", str(self.folder / "run" / "kubectl-cache"))
        done = self([str(self.binaries / "kubectl"), *cache, *argv], timeout=timeout)
        if done.code != 0:
            raise TestbedError(f"kubectl {' '.join(argv)}: {done.code} {done.err or done.out}")
        return done.out.strip()

    def apply(self, *objects: Object, namespace: str = "default") -> None:
        """Creates the objects unchanged; none of them may exist."""
        text = yaml.safe_dump_all(objects)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir=self.folder) as file:
            file.write(text)
            file.flush()
            self.kubectl("create", "--validate=false", "-n", namespace, "-f", file.name)

    def get(self, resource: str, name: str, namespace: str = "default") -> Object:
        if resource in GROUPS:
            return self._read(path(resource, self._namespace_of(resource, namespace), name))
        text = self.kubectl("get", resource, name, "-n", namespace, "-o", "json")
        found: Object = json.loads(text)
        return found

    def objects(
        self, resource: str, namespace: str = "default", selector: str = ""
    ) -> list[Object]:
        """`namespace=""` means all namespaces."""
        query = f"?labelSelector={quote(selector)}" if selector else ""
        if resource in GROUPS:
            where = path(resource, self._namespace_of(resource, namespace)) + query
            listed: list[Object] = self._read(where)["items"]
            return listed
        text = self.kubectl("get", resource, "-n", namespace, "-l", selector, "-o", "json")
        found: list[Object] = json.loads(text)["items"]
        return found

    @staticmethod
    def _namespace_of(resource: str, namespace: str) -> str:
        return "" if resource in CLUSTER_SCOPED else namespace

    @cached_property
    def _server_and_tls(self) -> tuple[str, ssl.SSLContext]:
        return admin_of(self.kubeconfig)

    def _read(self, where: str) -> Object:
        """Reads without kubectl, whose start takes longer than the request of a polling test."""
        server, tls = self._server_and_tls
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
        """Types of the conditions that are true; the newest comes last."""
        held = self.get(resource, name, namespace).get("status", {}).get("conditions", [])
        return [each["type"] for each in held if each["status"] == "True"]

    def as_user(
        self, rules: Sequence[Object], namespace: str = "default", *, user: str = "dev"
    ) -> Path:
        """Kubeconfig of a user with these rights (rules of a Role) in this namespace only."""
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
        """Creates a namespace and waits until pods can be created in it."""
        self.kubectl("create", "namespace", name)
        self.wait_for("its ServiceAccount", lambda: self.get("serviceaccounts", "default", name))
        return name

    def wait_for(self, what: str, holds: Callable[[], object], timeout: float = 200) -> None:
        wait_until(what, holds, timeout)

    def restore(self) -> None:
        """Returns the cluster to its state after the start: all nodes are ready, and there is no
        job, pod, claim or namespace of a test."""
        if run_within(["bash", str(SCRIPT), "status", str(self.folder)], os.environ, 30).code != 0:
            self._script("restart")
        if self.standins is None or self.standins.poll() is not None:
            self._start_standins()
        for name in self.order("lost"):
            self.restore_node(name)
        self.block_image_pulls()
        for node in self.objects("nodes"):
            name = node["metadata"]["name"]
            if node["spec"].get("unschedulable"):
                self.kubectl("uncordon", name)
        here = ("-n", "default", "--wait=false")
        self.kubectl("delete", ",".join((JOBS, *LEFTOVERS)), "--all", *here)
        self.kubectl("delete", "secrets,serviceaccounts", "-l", NDCTL_LABEL, *here)
        if namespaces := self._test_namespaces(terminating=False):
            for namespace in namespaces:
                # A namespace is deleted pods first, and a Job that still exists may hold its pods.
                self.kubectl("delete", JOBS, "--all", "-n", namespace, "--wait=false")
            self.kubectl("delete", "namespaces", *namespaces, "--wait=false")
        self.wait_for("no pods", self._no_pods, CLEANUP_S)
        # The next test may use the same name: objects in a terminating namespace are deleted.
        self.wait_for("no namespace of a test", lambda: not self._test_namespaces(), CLEANUP_S)
        self.wait_for("all nodes ready", self._all_nodes_ready, CLEANUP_S)
        shutil.rmtree(self.runs)
        self.runs.mkdir()

    def _test_namespaces(self, *, terminating: bool = True) -> list[str]:
        """Namespaces that tests created; with `terminating`, also those that are terminating."""
        known = [it["metadata"] for it in self.objects("namespaces")]
        return [
            it["name"]
            for it in known
            if it["name"] not in SYSTEM_NAMESPACES
            and (terminating or "deletionTimestamp" not in it)
        ]

    def _no_pods(self) -> bool:
        """Force-deletes all pods: a pod on a lost node would never end, nor would its namespace."""
        if not self.objects("pods", ""):
            return True
        force = ("--all", "--grace-period=0", "--force", "--wait=false")
        self.kubectl("delete", "pods", "--all-namespaces", *force)
        return False


NDCTL_LABEL = "app.kubernetes.io/part-of=ndctl"
JOBS = "pytorchjobs.kubeflow.org,trainjobs.trainer.kubeflow.org,jobsets.jobset.x-k8s.io"
LEFTOVERS = (
    *(
        "trainingruntimes.trainer.kubeflow.org",
        "deployments.apps",
        "configmaps",
        "resourcequotas",
        "limitranges",
        "roles",
        "rolebindings",
    ),
    *("persistentvolumeclaims", "events", "leases.coordination.k8s.io"),
)


def _post(where: str, body: Object) -> Object:
    done = run_within(
        ["curl", "-sf", "--max-time", "20", "-d", json.dumps(body), where], os.environ, 30
    )
    if done.code != 0:
        raise TestbedError(f"{where}: curl exited with {done.code}")
    answer: Object = json.loads(done.out)
    return answer


def _definitions(folder: Path) -> list[Path]:
    """Files of CustomResourceDefinitions: those of the operators, or else our copies."""
    crds = REPOSITORY / "manifests" / "crds"
    ours = {name: crds / f"{file}.yaml" for name, file in CRDS.items()}
    ours[CLUSTER_RUNTIMES] = _cluster_runtimes(folder)
    return [*{**ours, **real_operators.definitions()}.values()]


def _cluster_runtimes(folder: Path) -> Path:
    """The CRD of ClusterTrainingRuntime, made from that of TrainingRuntime."""
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
    # Addresses depend on the process id, so that two testbeds at the same time rarely share one.
    own = replace(shape or Shape(), net=16 + os.getpid() % 230)
    testbed = KubeTestbed(folder, own, assets())
    try:
        testbed.start()
        yield testbed
    finally:
        testbed.stop()
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Stops the testbeds of test runs that were killed."""
    for folder in Path("/tmp").glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        gone = pid.isdigit() and not Path(f"/proc/{pid}").exists()
        if gone and folder.is_dir() and folder.stat().st_uid == os.getuid():
            KubeTestbed(folder, Shape(), assets()).stop()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def kube_available() -> None:
    """Skips tests that start their own testbed if there is no control plane."""
    why = why_no_control_plane()
    if why is not None:
        pytest.skip(f"{NOT_RUN}{why}")
    sweep()


@pytest.fixture(scope="session")
def _shared_kube(kube_available: None) -> Iterator[KubeTestbed]:
    with running_testbed() as testbed:
        yield testbed


@pytest.fixture
def kube(_shared_kube: KubeTestbed) -> KubeTestbed:
    """The shared cluster, restored to its initial state."""
    _shared_kube.restore()
    return _shared_kube
