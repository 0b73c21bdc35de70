"""The hosts that a job is planned for: from an inventory file, the spec, or the cluster."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.codec import Problem
from orchestrator.contract.devices import GPU_NAMES
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import ClusterSpec, CommonSpec, JobSpec, ScriptSpec
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from orchestrator.errors import BackendError, PlanError

if TYPE_CHECKING:
    from orchestrator.app.excluded_hosts import ExcludedHost
    from orchestrator.backends.kubernetes.api.client import Api
    from orchestrator.backends.kubernetes.checks.queues import Gang
    from orchestrator.backends.kubernetes.inventory import HostsFor as KubernetesHosts
    from orchestrator.backends.slurm.commands import Slurm
    from orchestrator.backends.slurm.inventory import HostsFor as SlurmHosts
    from orchestrator.inventory.hosts import Inventory
    from orchestrator.inventory.profile import Profile
    from orchestrator.plan.history.record import SpeedRecord


class OtherSoftware(Struct, frozen=True):
    """The plan is compared with a run of other training software than the bundled trainer."""

    name: str


Purpose = Literal["look", "predict", "render", "submit"] | OtherSoftware
"""Why a plan is made. `look`: to show it. `predict`: the same, without what earlier jobs measured.
`render`: to print manifests that must not depend on the machine, so no Kubernetes cluster is asked,
and no earlier job counts. `submit`: to run it now."""


Basis = Sequence["SpeedRecord"] | OtherSoftware
"""What changes a predicted speed: what earlier jobs measured, or other software, about which they
say nothing."""


def is_shown(purpose: object) -> bool:
    """The plan is only shown."""
    return purpose in ("look", "predict") or isinstance(purpose, OtherSoftware)


class Found(Struct, frozen=True):
    spec: CommonSpec
    """Includes what the plan requests from the scheduler, such as a topology."""
    plan: Plan
    inventory: "Inventory"
    """The hosts that the plan was chosen from."""
    notes: tuple[str, ...] = ()
    """Facts that were found in the cluster and are not in the spec."""


def planned_hosts(
    spec: CommonSpec,
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    inventory: Path | None,
    purpose: Purpose,
    run_root: Path | None = None,
) -> Found:
    """Plan `spec` for the hosts of `purpose`, without hosts that strikes or pins exclude.

    Args:
        run_root: folder with strikes and pins; None: the run root of the spec.

    Raises:
        PlanError: no plan exists; has every reason.
        BackendError: the cluster is unreachable.
    """
    found = _found(spec, config, environ, inventory, purpose, run_root)
    if isinstance(purpose, OtherSoftware):
        from orchestrator.inventory.software import hosts_for_software

        # Other views of the plan count on these hosts too.
        return replace(found, inventory=hosts_for_software(found.inventory, purpose.name))
    if found.plan.software is not None and not is_shown(purpose):
        raise PlanError(
            f"the inventory is for runs of {found.plan.software}, but a job runs the bundled"
            " trainer",
            fix="remove the key software of the inventory",
        )
    return found


def _found(
    spec: CommonSpec,
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    inventory: Path | None,
    purpose: Purpose,
    run_root: Path | None,
) -> Found:
    from orchestrator.inventory.described import described_device

    backend = spec.cluster.backend
    basis = _basis(spec, environ, inventory, purpose, run_root)
    described = inventory is not None or described_device(spec.cluster) is not None
    # A job that will run on Slurm is planned for the nodes of Slurm even if the spec describes
    # them, because their topology goes into the request.
    if backend == "slurm" and inventory is None and (not is_shown(purpose) or not described):
        return _planned_on_slurm(spec, config, environ, run_root, basis)
    if backend != "kubernetes":
        return _planned_on(spec, config, inventory_for(spec, environ, inventory), basis)
    gang = _gang(spec, environ) if purpose == "submit" else None
    spec = _with(spec, gang.spec) if gang is not None else spec
    if described:
        kueue = gang.kueue if gang is not None else None
        found = _planned_on(spec, config, inventory_for(spec, environ, inventory), basis, kueue)
    else:
        found = _planned_on_kubernetes(spec, config, environ, basis)
    return replace(found, notes=(*found.notes, gang.note)) if gang and gang.note else found


def _basis(
    spec: CommonSpec,
    environ: Mapping[str, str],
    inventory: Path | None,
    purpose: Purpose,
    run_root: Path | None,
) -> Basis:
    """What jobs in the run root measured. Jobs of this machine ran beside other programs, so they
    count only for plans of this machine."""
    if isinstance(purpose, OtherSoftware):
        return purpose
    if purpose not in ("look", "submit") or isinstance(spec, ScriptSpec):
        return ()
    from orchestrator.job_paths import run_root_of
    from orchestrator.speed_history import path_of, recall

    # The run root of a job on Kubernetes is in its pods. Here are the copies of such jobs.
    folder = "" if spec.cluster.backend == "kubernetes" else spec.run_root
    found = recall(path_of(run_root or run_root_of(None, environ, folder)))
    here = spec.cluster.backend == "local" and inventory is None and spec.cluster.gpu is None
    return tuple(one for one in found if (one.backend == "local") == here)


def _plan(spec: CommonSpec, hosts: "Inventory", config: Mapping[str, Any], basis: Basis) -> Plan:
    if isinstance(spec, ScriptSpec):
        from orchestrator.plan.program import plan_program

        if isinstance(basis, OtherSoftware):
            raise PlanError(
                f"the speed of your own program is not predicted, with {basis.name} or without",
                fix="leave --software out, or plan a spec that has a model",
            )
        return plan_program(spec, hosts)
    from orchestrator.inventory.software import hosts_for_software
    from orchestrator.plan.planner import plan

    assert isinstance(spec, JobSpec)
    if isinstance(basis, OtherSoftware):
        return plan(spec, hosts_for_software(hosts, basis.name), config)
    return plan(spec, hosts, config, basis)


class Given(Struct, frozen=True, kw_only=True):
    """Nodes of an existing allocation."""

    nodes: tuple[str, ...]
    devices: int | None = None
    """GPUs per node, if Slurm reports it."""


def planned_as_given(
    spec: CommonSpec, config: Mapping[str, Any], environ: Mapping[str, str], given: Given
) -> Found:
    """Plan for the nodes of an existing allocation. Nodes that are not needed are spares."""
    from orchestrator.backends.slurm.inventory import hosts_given
    from orchestrator.inventory.slurm.gpus import gpu_table

    cluster, count = spec.cluster, len(given.nodes)
    if cluster.hosts > count:
        raise PlanError(
            f"cluster.hosts is {cluster.hosts}, but the allocation has {count} nodes:"
            f" {', '.join(given.nodes)}",
            fix=f"--set cluster.hosts={count}, or request an allocation of {cluster.hosts} nodes",
        )
    inventory = hosts_given(slurm(), gpu_table(environ), cluster, given.nodes)
    found = _plan(spec, inventory, config, _basis(spec, environ, None, "submit", None))
    cluster = replace(cluster, spare_hosts=count - cluster.hosts)
    return Found(replace(spec, cluster=cluster), found, inventory)


def inventory_for(
    spec: CommonSpec, environ: Mapping[str, str], inventory: Path | None
) -> "Inventory":
    """The hosts for a plan that is only shown."""
    from orchestrator.inventory.described import described_hosts
    from orchestrator.inventory.local import gpu_of_ranks, local_inventory

    backend = spec.cluster.backend
    if inventory is not None:
        from orchestrator.inventory.described import hosts_like
        from orchestrator.inventory.file import profile_in, read_inventory

        profile = profile_in(inventory)
        return hosts_like(spec.cluster, profile) if profile else read_inventory(inventory)
    if (described := described_hosts(spec.cluster)) is not None:
        return described
    if backend == "slurm":
        return _slurm_hosts(spec.cluster, environ).inventory
    if backend == "kubernetes":
        return _kubernetes_hosts(spec.cluster, environ).inventory
    gpu, own = gpu_of_ranks(spec.cluster, environ), _own_profile(environ)
    if own is not None and own.device == "cpu":
        return local_inventory(spec.cluster, gpu=gpu, cpu=own)
    return local_inventory(spec.cluster, gpu=gpu and (own or gpu))


def _own_profile(environ: Mapping[str, str]) -> "Profile | None":
    """The user's profile of this machine's devices, such as `ndctl calibrate` writes."""
    from orchestrator.contract.files import env
    from orchestrator.inventory.profiles import load_profile

    path = environ.get(env.PROFILE)
    return load_profile(path) if path else None


def mistakes(
    cluster: ClusterSpec, inventory: Path | None, purpose: Purpose | Given
) -> Iterator[Problem]:
    """Contradictory or missing keys about the hosts."""
    if (wrong := _contradiction(cluster)) is not None:
        yield wrong
    if purpose == "render" and cluster.backend == "kubernetes":
        yield from _unsaid(cluster, inventory)


def _unsaid(cluster: ClusterSpec, inventory: Path | None) -> Iterator[Problem]:
    """Keys that a Kubernetes spec needs if no cluster is asked."""
    from orchestrator.inventory.described import described_device

    spec = cluster.kubernetes
    if inventory is None and described_device(cluster) is None:
        yield Problem(
            path="cluster.gpu",
            limit="given, because no cluster is asked for the GPUs of its nodes",
            fix=f"add cluster.gpu, one of {', '.join(GPU_NAMES)}; or select the nodes with"
            " cluster.kubernetes.node_selector: {nvidia.com/gpu.product: …}; or give the hosts"
            " with --inventory FILE",
        )
    if spec.namespace is None and spec.service_account is None:
        yield Problem(
            path="cluster.kubernetes.namespace",
            limit="given, because no kubeconfig is read and the permissions of the pods belong to a"
            " service account of one namespace",
            fix="add cluster.kubernetes.namespace: NAME",
        )


def _contradiction(cluster: ClusterSpec) -> Problem | None:
    """A problem if node_selector and cluster.gpu name different GPUs."""
    from orchestrator.inventory.described import selected_device

    if cluster.backend != "kubernetes" or cluster.gpu is None:
        return None
    selected = selected_device(cluster)
    if selected in (None, cluster.gpu):
        return None
    return Problem(
        path="cluster.gpu",
        value=cluster.gpu,
        limit=f"{selected}, as in cluster.kubernetes.node_selector",
        fix="change one of them, or remove cluster.gpu",
    )


def _planned_on(
    spec: CommonSpec,
    config: Mapping[str, Any],
    hosts: "Inventory",
    basis: Basis,
    kueue: Collection[str] | None = None,
) -> Found:
    """Plan on given hosts. `kueue`: topology levels that Kueue supports."""
    found = _plan(spec, hosts, config, basis)
    if spec.cluster.backend != "kubernetes":
        return Found(spec, found, hosts)
    from orchestrator.inventory.kubernetes.request import request_of_spec, requested

    kubernetes, spares = spec.cluster.kubernetes, spec.cluster.spare_hosts
    asks = request_of_spec(found, hosts, kubernetes, spares=spares, kueue=kueue)
    found = replace(found, notes=(*found.notes, *asks.notes))
    return Found(_with(spec, requested(kubernetes, asks)), found, hosts)


def _with(spec: CommonSpec, kubernetes: KubernetesSpec) -> CommonSpec:
    return replace(spec, cluster=replace(spec.cluster, kubernetes=kubernetes))


def _planned_on_slurm(
    spec: CommonSpec,
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    run_root: Path | None,
    basis: Basis,
) -> Found:
    """Plan on the nodes of Slurm, and add the topology request to the spec."""
    from orchestrator.inventory.slurm.request import request_of, requested

    excluded = _excluded_on_slurm(spec, environ, run_root)
    hosts = _slurm_hosts(spec.cluster, environ, excluded)
    would_do = {host.name for host in hosts.inventory.hosts if host.state == "excluded"}
    undo = [f"to use {host.name}: {host.undo}" for host in excluded if host.name in would_do]
    try:
        found = _plan(spec, hosts.inventory, config, basis)
    except PlanError as exc:
        raise PlanError(exc.message, fix="\n    ".join([exc.fix, *undo])) from exc
    found = replace(found, notes=(*found.notes, *undo, *hosts.notes))
    asks = request_of(found, hosts.inventory, hosts.topology, spec.cluster.spare_hosts)
    cluster = replace(spec.cluster, slurm=requested(spec.cluster.slurm, asks))
    return Found(replace(spec, cluster=cluster), found, hosts.inventory)


def _excluded_on_slurm(
    spec: CommonSpec, environ: Mapping[str, str], run_root: Path | None
) -> "tuple[ExcludedHost, ...]":
    from orchestrator.app.excluded_hosts import excluded_hosts
    from orchestrator.app.schedulers import scheduler_of
    from orchestrator.job_paths import run_root_of
    from orchestrator.system import SystemClock

    root, clock = run_root or run_root_of(None, environ, spec.run_root), SystemClock()
    try:
        return excluded_hosts(root, scheduler_of("slurm", environ, clock), environ, clock)
    except BackendError:  # if Slurm is unreachable, listing its nodes reports it
        return ()


def _slurm_hosts(
    cluster: ClusterSpec, environ: Mapping[str, str], excluded: "Sequence[ExcludedHost]" = ()
) -> "SlurmHosts":
    from orchestrator.backends.slurm.inventory import hosts_for
    from orchestrator.inventory.slurm.gpus import gpu_table

    why = {host.name: host.why for host in excluded}
    return hosts_for(slurm(), gpu_table(environ), cluster, why)


def slurm() -> "Slurm":
    from orchestrator.backends.slurm.commands import Slurm
    from orchestrator.system import SystemClock, run_command

    return Slurm(run_command, SystemClock())


def _planned_on_kubernetes(
    spec: CommonSpec, config: Mapping[str, Any], environ: Mapping[str, str], basis: Basis
) -> Found:
    """Plan on the nodes of the cluster, and add the placement of the pods to the spec.

    In a cluster that creates nodes on demand, plan for as many nodes of the existing kind as the
    spec requests.
    """
    from orchestrator.inventory.described import described_hosts
    from orchestrator.inventory.kubernetes.request import request_of, requested

    kubernetes, spares = spec.cluster.kubernetes, spec.cluster.spare_hosts
    hosts = _kubernetes_hosts(spec.cluster, environ)
    if hosts.to_come is not None:
        to_come = described_hosts(replace(spec.cluster, gpu=hosts.to_come))
        assert to_come is not None, "the kind is known"
        come = _planned_on(spec, config, to_come, basis, hosts.kueue)
        return replace(come, plan=replace(come.plan, notes=(*come.plan.notes, *hosts.notes)))
    try:
        found = _plan(spec, hosts.inventory, config, basis)
    except PlanError as exc:
        raise PlanError(exc.message, fix=exc.fix + hosts.advice) from exc
    asks = request_of(
        found, hosts.inventory, hosts.nodes, kubernetes, spares=spares, kueue=hosts.kueue
    )
    found = replace(found, notes=(*found.notes, *hosts.notes, *asks.notes))
    return Found(_with(spec, requested(kubernetes, asks)), found, hosts.inventory)


def _gang(spec: CommonSpec, environ: Mapping[str, str]) -> "Gang":
    """The gang scheduler of the cluster, if the spec does not name one."""
    from orchestrator.backends.kubernetes.checks.queues import gang_for

    kubernetes, hosts = spec.cluster.kubernetes, spec.cluster.hosts + spec.cluster.spare_hosts
    api = kubernetes_api(kubernetes.context, environ)
    return gang_for(api, kubernetes.namespace or api.namespace, kubernetes, hosts)


def _kubernetes_hosts(cluster: ClusterSpec, environ: Mapping[str, str]) -> "KubernetesHosts":
    from orchestrator.backends.kubernetes.inventory import hosts_for
    from orchestrator.inventory.kubernetes.gpus import gpu_table

    return hosts_for(
        kubernetes_api(cluster.kubernetes.context, environ), gpu_table(environ), cluster
    )


def kubernetes_api(context: str | None, environ: Mapping[str, str]) -> "Api":
    from orchestrator.backends.kubernetes.api.client import Api
    from orchestrator.system import SystemClock

    return Api(context, environ, SystemClock())
