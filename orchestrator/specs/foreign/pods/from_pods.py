"""The pods of another tool's manifest as a job spec."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from orchestrator.contract.spec.job_spec import kubernetes_name
from orchestrator.contract.spec.slurm_spec import bad_variable
from orchestrator.specs.foreign.around_program import exported_by_mpi
from orchestrator.specs.foreign.carried import Carried, braced, job_name, number_of
from orchestrator.specs.foreign.command_lines import sizes_of, variable_ranks
from orchestrator.specs.foreign.pods.from_launcher import REFERENCE, with_handed
from orchestrator.specs.foreign.pods.manifests import Pods, at
from orchestrator.specs.foreign.pods.near_pods import OwnPods, without_own_rules
from orchestrator.specs.foreign.pods.policies import set_policies
from orchestrator.specs.foreign.pods.volumes import own_container, set_volumes
from orchestrator.specs.foreign.run_key import names_file, set_program, set_variables, short
from orchestrator.specs.foreign.shell.script import Shell, Start, read_shell
from orchestrator.specs.foreign.shell.words import PLACEHOLDER, variables_for_placeholders

EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
"""An annotation: each child Job of a JobSet has a topology domain of its own."""
QUEUE = "kueue.x-k8s.io/queue-name"
OF_TOOLS = re.compile(
    r"(trainer\.kubeflow\.org|training\.kubeflow\.org|jobset\.sigs\.k8s\.io|batch\.kubernetes\.io)/.*"
    r"|controller-uid|kubectl\.kubernetes\.io/last-applied-configuration"
)
"""Labels that operators read or set, and what kubectl notes."""
BY_NDCTL_ALWAYS = re.compile(
    r"app\.kubernetes\.io/(name|instance|component|part-of|managed-by)|ndctl\.dev/job"
)
"""Labels that each object of a job has; a spec must not give them."""
GPU = re.compile(r"[\w.-]+/(gpu|mig-[\w.]+)|\$\{GPU_RESOURCE\}|gpu", re.IGNORECASE)
ACCELERATOR = re.compile(r".*/(tpu|neuron\w*|npu|hpu|gaudi|.*ascend.*)", re.IGNORECASE)
"""Devices of a pod that are not GPUs."""
RDMA = re.compile(r"rdma/.+|.*/(efa|hostdev|rdma.*|hca.*|ib.*|roce.*)", re.IGNORECASE)
BY_NDCTL = frozenset(
    [
        "containers",
        "volumes",
        "nodeSelector",
        "tolerations",
        "priorityClassName",
        "serviceAccountName",
        "serviceAccount",
        "imagePullSecrets",
        "hostNetwork",
        "restartPolicy",
        "activeDeadlineSeconds",
        "terminationGracePeriodSeconds",
        "hostname",
        "subdomain",
        "setHostnameAsFQDN",
        "schedulerName",
    ]
)
"""Fields of a pod that are read on their own, or that ndctl sets itself."""
DEFAULTS = (
    ("enableServiceLinks", True),
    ("dnsPolicy", "ClusterFirst"),
    ("dnsPolicy", "ClusterFirstWithHostNet"),
)
"""What an API server adds to each pod, and ndctl to one with the network of its node."""
OF_CONTAINER = frozenset(
    [
        "name",
        "image",
        "imagePullPolicy",
        "command",
        "args",
        "env",
        "envFrom",
        "resources",
        "volumeMounts",
        "workingDir",
        "ports",
        "tty",
        "stdin",
        "terminationMessagePath",
        "terminationMessagePolicy",
    ]
)
IN_TEMPLATE = re.compile(r"\$\{?[A-Z][A-Z0-9_]*\}?")
MOST_REPLACED = 1_000
"""Characters of a value in another one: values that name each other may grow without end."""
PROBES = ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle")


def from_pods(one: Mapping[str, Any], pods: Pods, stem: str) -> Carried:
    """The spec for `pods`, which the object `one` of a manifest creates."""
    carried = Carried(left=[*pods.notes])
    meta = at(one, "metadata") or {}
    name = str(meta.get("name") or meta.get("generateName") or stem)
    carried.name = kubernetes_name(job_name(name))
    pod = at(pods.template, "spec") or {}
    container = _trainer(pod)
    kubernetes: dict[str, Any] = {"kind": pods.kind}
    if (namespace := meta.get("namespace")) is not None:
        kubernetes["namespace"] = braced(str(namespace))
    shell, start = _started(pods, container)
    set_program(carried, start)
    if start is None and pods.command is None and (args := _list(container.get("args"))):
        carried.run["args"] = [braced(str(one)) for one in args]
        carried.before.append("name in run what the image starts; run.args has its arguments")
    folder = shell.folder or container.get("workingDir")
    if folder:
        carried.run["workdir"] = braced(str(folder))
    set_variables(carried, shell)
    of_rank = with_handed(carried, pods, container, start.words if start is not None else ())
    _rest_of_command(carried, of_rank, shell, start)
    if (hosts := number_of(pods.hosts)) is None:
        carried.before.append(f"set cluster.hosts: the manifest says {pods.hosts}")
    hosts = hosts or 1
    each = _resources(carried, kubernetes, container, pods, start)
    carried.cluster = {"backend": "kubernetes", "hosts": hosts, "gpus_per_host": each}
    _image(carried, kubernetes, container, pod)
    _variables(carried, kubernetes, of_rank)
    _places(kubernetes, pod)
    _labels(carried, kubernetes, one, pods)
    set_volumes(carried, kubernetes, pod, container)
    own = OwnPods(
        name=name,
        before=at(pods.template, "metadata", "labels") or {},
        now=kubernetes.get("labels", {}),
    )
    _other_fields(carried, kubernetes, without_own_rules(carried, kubernetes, pod, own), container)
    set_policies(carried, kubernetes, one, pod)
    if "pod_template" in kubernetes:
        kubernetes["pod_template"] = kubernetes.pop("pod_template")  # it is the longest
    carried.cluster["kubernetes"] = kubernetes
    return carried


def _trainer(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The container that trains: the first that asks for GPUs, or the first."""
    containers = [one for one in pod.get("containers") or [] if isinstance(one, dict)]
    asking = (one for one in containers if GPU.search(str(at(one, "resources"))))
    return next(asking, containers[0] if containers else {})


def _started(pods: Pods, container: Mapping[str, Any]) -> tuple[Shell, Start | None]:
    """What the command of the pods starts; it may be a script of a shell."""
    words = pods.command
    if words is None:
        words = [*_list(container.get("command")), *_list(container.get("args"))]
    words = [braced(str(one)) for one in words]
    values, known = _values_of(container if pods.launcher is None else pods.launcher)

    def variable(found: re.Match[str]) -> str:
        name = found[1]
        # Another $(date) is a command of the shell.
        is_one = name in values or name.isupper()
        return known.get(name, f"${{{name}}}") if is_one else found[0]

    words = [REFERENCE.sub(variable, one) for one in words]
    # Variables of a template are in quotes here, and stay variables.
    shell = read_shell(shlex.join(words), {**known}, literal="${") if words else Shell()
    start = shell.training()
    alone = pods.command is None and not container.get("command")
    if start is None and alone and words and not re.search(r"/|sh$", words[0]):
        return Shell(), None  # arguments of what the image starts
    if start is None and words:
        # Words in `${…}` were quoted, so the line is a single command.
        start = Start(1, tuple(words), shlex.join(words))
        shell = Shell()
    if start is not None and not any(re.match(r"[^-]", word) for word in start.words):
        start = None
    return shell, start


def _rest_of_command(
    carried: Carried, container: Mapping[str, Any], shell: Shell, start: Start | None
) -> None:
    """What the command does besides the start of the training."""
    words = start.words if start is not None else ()
    others = [text for _, text in shell.others]
    others += [one.text for one in shell.starts if start is None or one.words != words]
    for text in others:
        carried.leave(
            f"in its command: {text[:60]}: what it does belongs into the image or an init container"
        )
    for _, file, text in shell.written:
        carried.leave(f"in its command: {short(text)}: it writes {file}")
        if names_file(words, file):
            carried.before.append(
                f"put {file} into the image or on a volume: the command of the manifest writes it"
            )
    given = [at(one, "name") for one in container.get("env") or []]
    if names := [name for name in exported_by_mpi(words) if name not in given]:
        carried.leave(f"mpirun -x {', '.join(names)}: ranks have the variables of their own pods")


def _values_of(container: Mapping[str, Any]) -> tuple[set[str], dict[str, str]]:
    """Names of the container's variables, and those values that are known. Kubernetes replaces
    `$(NAME)` in a value by an earlier variable."""
    names: set[str] = set()
    known: dict[str, str] = {}
    short: dict[str, str] = {}
    for one in container.get("env") or []:
        name, value = str(at(one, "name")), at(one, "value")
        names.add(name)
        if not isinstance(value, str):
            continue
        if len(value) <= MOST_REPLACED:
            value = REFERENCE.sub(lambda found: short.get(found[1], found[0]), value)
            if len(value) <= MOST_REPLACED and "$" not in value:
                short[name] = value
        if value and "$" not in value:
            known[name] = value
    return names, known


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def _resources(
    carried: Carried,
    kubernetes: dict[str, Any],
    container: Mapping[str, Any],
    pods: Pods,
    start: Start | None,
) -> Any:
    """The ranks of a pod. Sets the resources that it asks for."""
    limits = at(container, "resources", "limits") or {}
    requests = at(container, "resources", "requests") or {}
    asked = {**limits, **requests}
    gpus = {name: asked[name] for name in asked if GPU.fullmatch(braced(name))}
    # mpirun has the number of all ranks.
    typed = [f"--nnodes={pods.hosts}", *start.words] if start is not None else []
    sizes = dict(zip(*[iter(sizes_of(typed))] * 2, strict=True))
    each = number_of(next(iter(gpus.values()), None))
    if not gpus and pods.says_devices:
        kubernetes["gpu_resource"] = None
    elif not gpus:
        pass  # the runtime, which is not in the file, says it
    elif (resource := braced(next(iter(gpus)))) != "nvidia.com/gpu":
        kubernetes["gpu_resource"] = resource
    rest: set[str] = set()
    for name, count in asked.items():
        if RDMA.fullmatch(name) and name not in gpus and "rdma_resource" not in kubernetes:
            kubernetes.update({"rdma_resource": name, "rdma_count": number_of(count) or 1})
        elif name in ("cpu", "memory"):
            kubernetes[name] = braced(str(count))
        elif name not in gpus:
            rest.add(name)
    # ndctl limits memory to its request, and CPUs not at all.
    more = {name: limits[name] for name in limits if name in rest}
    more |= {
        name: limits[name]
        for name in ("cpu", "memory")
        if name in limits and (name == "cpu" or limits[name] != asked[name])
    }
    wanted = {name: requests[name] for name in requests if name in rest}
    template = {**({"limits": more} if more else {}), **({"requests": wanted} if wanted else {})}
    claims = at(container, "resources", "claims")
    template |= {"claims": claims} if claims else {}
    if template:
        own_container(kubernetes)["resources"] = template
    _ask_for_devices(carried, rest, None if gpus else claims)
    by_launcher = variable_ranks(typed) or number_of(sizes.get("--gpus-per-host"))
    said = each or number_of(pods.ranks) or by_launcher
    if not said and not gpus and not pods.says_devices:
        carried.before.append(
            "set cluster.gpus_per_host, 1 here: the runtime, which is not in this file, says it"
        )
    return said or 1


def _ask_for_devices(carried: Carried, names: set[str], claims: Any) -> None:
    """Devices that a spec does not count."""
    if claims:
        carried.before.append("set cluster.gpus_per_host: the pods get devices by resource claims")
    for name in sorted(name for name in names if ACCELERATOR.fullmatch(name)):
        carried.before.append(
            f"check cluster.gpus_per_host, the ranks of a host: {name} is no GPU, and ndctl counts"
            " GPUs"
        )


def _image(
    carried: Carried,
    kubernetes: dict[str, Any],
    container: Mapping[str, Any],
    pod: Mapping[str, Any],
) -> None:
    if image := container.get("image"):
        kubernetes["image"] = variables_for_placeholders(braced(str(image)))
        carried.before.append(
            f"build an image with ndctl on top of {kubernetes['image']}, and name it as"
            " cluster.kubernetes.image (manifests/image/ has the recipe)"
        )
    else:
        carried.before.append("name an image with ndctl as cluster.kubernetes.image")
    if policy := container.get("imagePullPolicy"):
        kubernetes["image_pull_policy"] = policy
    if secrets := [at(one, "name") for one in pod.get("imagePullSecrets") or []]:
        kubernetes["image_pull_secrets"] = secrets


def _variables(carried: Carried, kubernetes: dict[str, Any], container: Mapping[str, Any]) -> None:
    env: dict[str, Any] = {}
    for one in container.get("env") or []:
        name = str(at(one, "name"))
        if bad_variable(name) is not None:
            continue
        used = REFERENCE.findall(str(one.get("value")))
        if "valueFrom" in one or not {*used}.isdisjoint(carried.of_pods):
            carried.of_pods.append(name)
        if (value := _variable(one)) is not None:
            env[name] = value
        else:
            own_container(kubernetes).setdefault("env", []).append(dict(one))
    if env:
        kubernetes["env"] = env
    sources = [
        {here: named, **({"prefix": one["prefix"]} if one.get("prefix") else {})}
        for one in container.get("envFrom") or []
        for key, here in (("secretRef", "secret"), ("configMapRef", "config_map"))
        if (named := at(one, key, "name")) is not None
    ]
    if sources:
        kubernetes["env_from"] = sources


def _variable(one: Mapping[str, Any]) -> Any:
    """The value of a variable, as a spec has it; None: a spec has no such source."""
    for key, here in (("secretKeyRef", "secret"), ("configMapKeyRef", "config_map")):
        if (source := at(one, "valueFrom", key)) is not None:
            return {here: at(source, "name"), "key": at(source, "key")}
    if "valueFrom" in one:
        return None
    # Templates have variables in capitals. Others are those of a script that the value is.
    text = re.sub(r"\$\{(?![A-Z][A-Z0-9_]*\})", "$${", str(one.get("value") or ""))
    return re.sub(r"(?<!\$)\$([A-Z][A-Z0-9_]*)", r"${\1}", text)


def _places(kubernetes: dict[str, Any], pod: Mapping[str, Any]) -> None:
    """Which nodes the pods may use."""
    if selector := pod.get("nodeSelector"):
        kubernetes["node_selector"] = {key: braced(str(value)) for key, value in selector.items()}
    if given := pod.get("tolerations"):
        names = {"tolerationSeconds": "toleration_seconds"}
        kubernetes["tolerations"] = [
            _with_operator({names.get(key, key): value for key, value in one.items()})
            for one in given
        ]
    if klass := pod.get("priorityClassName"):
        kubernetes["priority_class"] = braced(str(klass))
    if pod.get("hostNetwork"):
        kubernetes["host_network"] = True


def _with_operator(one: dict[str, Any]) -> dict[str, Any]:
    """Kubernetes' own default is Equal; that of a spec is Exists."""
    texts = {key: braced(value) if isinstance(value, str) else value for key, value in one.items()}
    return {**texts, "operator": "Equal"} if "value" in texts and "operator" not in texts else texts


def _labels(
    carried: Carried, kubernetes: dict[str, Any], one: Mapping[str, Any], pods: Pods
) -> None:
    for here in ("labels", "annotations"):
        given = {**(at(pods.template, "metadata", here) or {}), **(at(one, "metadata", here) or {})}
        if here == "labels" and (queue := given.pop(QUEUE, None)) is not None:
            kubernetes["queue"] = queue
        if "controller-uid" in given:  # a Job of a server, which labels its pods
            given.pop("job-name", None)
        kept = {key: str(value) for key, value in given.items() if not OF_TOOLS.fullmatch(key)}
        for key in [key for key in kept if here == "labels" and BY_NDCTL_ALWAYS.fullmatch(key)]:
            carried.leave(f"the label {key}: {kept.pop(key)}: ndctl sets it itself")
        if (domain := kept.get(EXCLUSIVE)) is not None and pods.group is not None:
            del kept[EXCLUSIVE]
            carried.leave(
                f"{EXCLUSIVE}: {domain}: ndctl's JobSet has a single child Job, so all hosts would"
                " share one domain; with a queue of Kueue, cluster.kubernetes.topology:"
                f" {{slice: {domain}, slice_size: {pods.group}}} keeps each {pods.group} together"
            )
        if kept:
            kubernetes[here] = kept
    scheduler = at(pods.template, "spec", "schedulerName") or at(one, "spec", "schedulerName")
    if scheduler == "volcano":
        kubernetes["gang_scheduler"] = "volcano"
        queue = at(one, "spec", "queue")
        if queue not in (None, "default"):
            carried.leave(f"queue {queue} of Volcano: set its annotation in annotations")
    elif scheduler not in (None, "default-scheduler"):
        carried.leave(f"schedulerName {scheduler}: add it to cluster.kubernetes.pod_template")


def _other_fields(
    carried: Carried,
    kubernetes: dict[str, Any],
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
) -> None:
    """Fields without a key of a spec, which `pod_template` takes as they are."""
    template = {
        key: value
        for key, value in pod.items()
        if key not in BY_NDCTL and (key, value) not in DEFAULTS
    }
    rest = {
        key: value
        for key, value in container.items()
        if key not in OF_CONTAINER and key not in PROBES
    }
    for key in PROBES:
        if key in container:
            carried.leave(f"{key}: ndctl watches the ranks itself")
    beside = [one for one in pod.get("containers") or [] if one is not container]
    if rest or beside:
        own_container(kubernetes).update(rest)
        kubernetes["pod_template"]["spec"]["containers"] += beside
    if template:
        given = kubernetes.setdefault("pod_template", {"spec": {}})
        given["spec"] = {**template, **given["spec"]}
    text = str(kubernetes.get("pod_template", ""))
    if names := dict.fromkeys([*IN_TEMPLATE.findall(text), *PLACEHOLDER.findall(text)]):
        carried.before.append(
            f"check {', '.join(names)} in pod_template, where ndctl replaces no variables"
        )
    account = pod.get("serviceAccountName") or pod.get("serviceAccount")
    if account not in (None, "default"):
        kubernetes["service_account"] = braced(str(account))
        carried.before.append(
            f"give the account {account} the rights of a leader (manifests/README.md), or remove"
            " service_account, and the job makes its own"
        )
