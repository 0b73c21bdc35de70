"""From a spec to its plan: `ndctl validate`, `plan` and `inventory`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.contract.plan import Plan
from orchestrator.contract.spec import JobSpec
from orchestrator.errors import BackendError, NdctlError, PlanError, SpecError

if TYPE_CHECKING:
    from orchestrator.app.inputs import Looked
    from orchestrator.backends.kubernetes.api import Api
    from orchestrator.backends.kubernetes.inventory import HostsFor as KubernetesHosts
    from orchestrator.backends.slurm.commands import Slurm
    from orchestrator.backends.slurm.inventory import HostsFor
    from orchestrator.cluster.inventory import Inventory
    from orchestrator.load import Written
    from orchestrator.plan.show.compare import Compared
    from orchestrator.plan.show.zero import ZeroTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A spec with everything that follows from it."""

    spec: JobSpec
    plan: Plan
    model_config: Mapping[str, Any]
    written: "Written | None" = None
    """Where the spec's values were written; None of one that came in no file."""
    looked: "Looked | None" = None
    """What came of looking for all that the spec names; None: nobody has looked yet."""


def plan_spec(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None = None,
) -> Planned:
    """Read and plan a spec, for the hosts in the file `inventory`, or else for those of the spec's
    backend: Slurm's, Kubernetes', or this machine's.

    Raises SpecError or PlanError with everything that is wrong, BackendError where the cluster does
    not answer.
    """
    from orchestrator.load import read_written

    return _planned(read_written(path, overrides), environ, inventory)


def plan_and_look(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None = None,
) -> Planned:
    """The same of a job that is to run: data, tokenizer and weights have to be there as well.

    Raises as `plan_spec`; a SpecError has everything that is missing, and a refusal of the plan.
    """
    from orchestrator.app.inputs import look
    from orchestrator.load import read_written
    from orchestrator.model_config import hub_cache

    written = read_written(path, overrides)
    looked = look(written.spec, hub_cache(environ), hosts_of_a_file=inventory is not None)
    also: NdctlError | None = None
    try:
        planned = _planned(written, environ, inventory)
    except NdctlError as exc:
        if not looked.problems:
            raise
        # What is missing is known although the cluster did not answer, which is news for later.
        also = None if isinstance(exc, BackendError) else exc
    if looked.problems:
        raise written.refused(looked.problems, also)
    return replace(planned, looked=looked)


def _planned(written: "Written", environ: Mapping[str, str], inventory: Path | None) -> Planned:
    from orchestrator.model_config import hub_cache, read_model_config

    try:
        config = read_model_config(written.spec.model, hub_cache(environ))
    except SpecError as exc:
        place = written.document.place_of("model.path")
        place = "--set " if place == "--set model.path" else f"{place}: "
        raise SpecError(f"{place}{exc.message}", fix=exc.fix) from exc
    planned = _planned_for(written.spec, config, environ, inventory)
    return replace(planned, written=written)


def _planned_for(
    spec: JobSpec,
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    inventory: Path | None,
) -> Planned:
    from orchestrator.plan.planner import plan

    if inventory is None and spec.cluster.backend == "slurm":
        return _planned_on_slurm(spec, config, environ)
    if inventory is None and spec.cluster.backend == "kubernetes":
        return _planned_on_kubernetes(spec, config, environ)
    found = plan(spec, _inventory(spec, inventory, environ), config)
    return Planned(spec=spec, plan=found, model_config=config)


def _planned_on_slurm(
    spec: JobSpec, config: Mapping[str, Any], environ: Mapping[str, str]
) -> Planned:
    """Planned for the hosts that Slurm has, and with what the plan asks of the topology."""
    from orchestrator.cluster.slurm.request import request_of, requested
    from orchestrator.plan.planner import plan

    hosts = _slurm_hosts(spec, environ)
    found = plan(spec, hosts.inventory, config)
    found = replace(found, notes=(*found.notes, *hosts.notes))
    asks = request_of(found, hosts.inventory, hosts.topology, spec.cluster.spare_hosts)
    cluster = replace(spec.cluster, slurm=requested(spec.cluster.slurm, asks))
    return Planned(spec=replace(spec, cluster=cluster), plan=found, model_config=config)


def _slurm_hosts(spec: JobSpec, environ: Mapping[str, str]) -> "HostsFor":
    from orchestrator.backends.slurm.inventory import hosts_for
    from orchestrator.cluster.slurm.gpus import gpu_table

    return hosts_for(_slurm(), gpu_table(environ), spec.cluster)


def _slurm() -> "Slurm":
    from orchestrator.backends.slurm.commands import Slurm
    from orchestrator.system import SystemClock, run_command

    return Slurm(run_command, SystemClock(), "; or give the hosts with --inventory FILE")


def _planned_on_kubernetes(
    spec: JobSpec, config: Mapping[str, Any], environ: Mapping[str, str]
) -> Planned:
    """Planned for the nodes that there are, and with what the plan asks of where pods come to
    lie."""
    from orchestrator.cluster.kubernetes.request import request_of, requested
    from orchestrator.plan.planner import plan

    hosts, kubernetes = _kubernetes_hosts(spec, environ), spec.cluster.kubernetes
    found = plan(spec, hosts.inventory, config)
    spares = spec.cluster.spare_hosts
    asks = request_of(
        found, hosts.inventory, hosts.nodes, kubernetes, spares=spares, kueue=hosts.kueue
    )
    found = replace(found, notes=(*found.notes, *hosts.notes, *asks.notes))
    cluster = replace(spec.cluster, kubernetes=requested(kubernetes, asks))
    return Planned(spec=replace(spec, cluster=cluster), plan=found, model_config=config)


def _kubernetes_hosts(spec: JobSpec, environ: Mapping[str, str]) -> "KubernetesHosts":
    from orchestrator.backends.kubernetes.inventory import hosts_for
    from orchestrator.cluster.kubernetes.gpus import gpu_table

    api = _api(spec.cluster.kubernetes.context, environ)
    return hosts_for(api, gpu_table(environ), spec.cluster)


def _api(context: str | None, environ: Mapping[str, str]) -> "Api":
    from orchestrator.backends.kubernetes.api import Api
    from orchestrator.system import SystemClock

    return Api(context, environ, SystemClock())


def _inventory(spec: JobSpec, file: Path | None, environ: Mapping[str, str]) -> "Inventory":
    if file is not None:
        from orchestrator.cluster.file import read_inventory

        return read_inventory(file)
    if spec.cluster.backend == "slurm":
        return _slurm_hosts(spec, environ).inventory
    if spec.cluster.backend == "kubernetes":
        return _kubernetes_hosts(spec, environ).inventory
    from orchestrator.cluster.local import local_inventory

    return local_inventory(spec.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The hosts that there are, and what a person should know of how they were counted."""

    inventory: "Inventory"
    notes: tuple[str, ...] = ()


def inventory_at(
    file: Path | None,
    environ: Mapping[str, str],
    backend: str = "local",
    partition: str | None = None,
    context: str | None = None,
) -> Seen:
    """The hosts in `file`, or else those of `backend`: Slurm's in `partition`, Kubernetes' of the
    kubeconfig's `context`, or this machine."""
    if file is None and backend == "slurm":
        from orchestrator.backends.slurm.inventory import read_cluster
        from orchestrator.cluster.slurm.gpus import gpu_table
        from orchestrator.cluster.slurm.inventory import Use

        found = read_cluster(_slurm(), partition, whole=True)
        return Seen(inventory=found.inventory(gpu_table(environ), Use()))
    if file is None and backend == "kubernetes":
        return _kubernetes_inventory(environ, context)
    if file is None:
        from orchestrator.cluster.local import this_machine

        return Seen(inventory=this_machine(environ))
    from orchestrator.cluster.file import read_inventory

    return Seen(inventory=read_inventory(file))


def _kubernetes_inventory(environ: Mapping[str, str], context: str | None) -> Seen:
    from orchestrator.backends.kubernetes.inventory import read_cluster, usual
    from orchestrator.cluster.kubernetes.gpus import gpu_table

    seen = read_cluster(_api(context, environ))
    return Seen(inventory=seen.inventory(gpu_table(environ), usual(seen)), notes=seen.notes)


def compare_plans(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None,
    compare: Sequence[str],
) -> "list[Compared]":
    """A plan for each combination of the values in `compare`, each `KEY=VALUE,VALUE`."""
    from itertools import product

    from orchestrator.plan.show.compare import Compared

    keys = [one.partition("=")[::2] for one in compare]
    found = []
    for values in product(*([f"{key}={value}" for value in some.split(",")] for key, some in keys)):
        said = " ".join(values)
        try:
            planned = plan_spec(path, (*overrides, *values), environ, inventory)
        except PlanError as exc:
            found.append(Compared(values=said, plan=None, refusal=exc.message))
        else:
            found.append(Compared(values=said, plan=planned.plan))
    return found


def zero_of(
    path: Path, overrides: Sequence[str], environ: Mapping[str, str], inventory: Path | None
) -> "ZeroTable":
    """What ZeRO's levels need of the model on as many devices as the job has, fit or not."""
    from orchestrator.load import read_spec
    from orchestrator.model_config import hub_cache, read_model_config
    from orchestrator.plan.model.families import shape_of
    from orchestrator.plan.show.zero import ZeroTable

    spec = read_spec(path, overrides)
    shape = shape_of(read_model_config(spec.model, hub_cache(environ)))
    devices = spec.cluster.hosts * spec.cluster.gpus_per_host
    fabric = _inventory(spec, inventory, environ).fabric(spec.cluster.gpus_per_host)
    real = inventory is not None or spec.cluster.backend != "local"
    limit = fabric.profile.memory_bytes if fabric and real else None
    return ZeroTable.of(shape, devices, spec.train.optimizer.name, limit)
