"""Read and plan a spec: `ndctl validate`, `plan`, `inventory`, and the first part of `submit`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.app.planning.planned_hosts import (
    Given,
    Purpose,
    inventory_for,
    is_shown,
    kubernetes_api,
    mistakes,
    planned_as_given,
    planned_hosts,
    slurm,
)
from orchestrator.contract.plan import Plan
from orchestrator.contract.spec.job_spec import CommonSpec, JobSpec, ScriptSpec
from orchestrator.errors import BackendError, NdctlError, PlanError, SpecError
from orchestrator.yaml_document import lead

if TYPE_CHECKING:
    from orchestrator.app.submission.inputs import Looked
    from orchestrator.inventory.hosts import Inventory
    from orchestrator.load import Written
    from orchestrator.plan.beside import Beside
    from orchestrator.plan.show.zero import ZeroTable


class Planned(Struct, frozen=True, kw_only=True):
    """A spec with its plan."""

    spec: CommonSpec
    plan: Plan
    inventory: "Inventory"
    """The hosts that the plan was chosen from."""
    model_config: Mapping[str, Any]
    written: "Written | None" = None
    """The file with the places of the values; None for a spec without a file."""
    looked: "Looked | None" = None
    """Result of the input checks; None: not checked yet."""
    notes: tuple[str, ...] = ()
    """Facts that were found in the cluster, printed at submission."""


def plan_spec(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None = None,
    run_root: Path | None = None,
    purpose: Purpose = "look",
) -> Planned:
    """Read and plan a spec.

    The hosts come from the file `inventory`, else from the spec, else from the backend.

    Args:
        run_root: folder with the strikes and pins that exclude hosts; None: the spec's run root.

    Raises:
        SpecError, PlanError: with everything that is wrong.
        BackendError: the cluster is unreachable.
    """
    from orchestrator.app.planning.reading import read_and_judge

    def planned(written: "Written") -> Planned:
        return _planned(written, environ, inventory, run_root, purpose)

    return planned(read_and_judge(path, overrides, environ, planned))


def plan_and_look(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None = None,
    run_root: Path | None = None,
    purpose: Purpose | Given = "look",
) -> Planned:
    """Like `plan_spec`, and check that data, tokenizer and weights exist.

    With `Given`, plan for those nodes of Slurm. The SpecError also lists missing inputs.
    """
    from orchestrator.app.planning.reading import read_and_judge
    from orchestrator.load import read_written

    def planned(written: "Written") -> Planned:
        return plan_written(written, environ, inventory, run_root, purpose)

    if isinstance(purpose, Given):
        written = read_written(path, overrides, environ)
        overrides = (*overrides, *_as_given(written, purpose))
    return planned(read_and_judge(path, overrides, environ, planned))


def plan_and_look_back(
    path: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    inventory: Path | None = None,
    run_root: Path | None = None,
    purpose: Purpose = "look",
) -> Planned:
    """Like `plan_and_look`, and check that the job can resume.

    Raises:
        SpecError: the checkpoint has another model or other data than the spec.
        JobError: the job cannot resume with any spec.
    """
    from orchestrator.app.planning.reading import read_and_judge

    def planned(written: "Written") -> Planned:
        # Whether a job can resume depends on nearly all keys, so a wrong one leaves it open.
        return plan_written(written, environ, inventory, run_root, purpose)

    written = read_and_judge(path, overrides, environ, planned)
    return plan_written(written, environ, inventory, run_root, purpose, resume=True)


def plan_written(
    written: "Written",
    environ: Mapping[str, str],
    inventory: Path | None = None,
    run_root: Path | None = None,
    purpose: Purpose | Given = "submit",
    *,
    resume: bool = False,
) -> Planned:
    """Like `plan_and_look`, for a spec that was read already. `resume`: as `plan_and_look_back`."""
    # A plan for devices that the spec names is often made on a laptop, for a cluster elsewhere.
    other_hosts = inventory is not None or (
        is_shown(purpose) and written.spec.cluster.gpu is not None
    )
    looked = look_at(written, environ, run_root, other_hosts=other_hosts, resume=resume)
    also: list[NdctlError] = [] if looked.refusal is None else [looked.refusal]
    try:
        planned = _planned(written, environ, inventory, run_root, purpose)
    except NdctlError as exc:
        if not looked.problems and not also:
            raise
        # Report the missing inputs even if the cluster is unreachable. That error is dropped: the
        # user sees it after the inputs are fixed.
        also += [] if isinstance(exc, BackendError) else [exc]
    if looked.problems or len(also) > 1:
        raise written.refused(looked.problems, also)
    if also:
        raise also[0]
    return replace(planned, looked=looked)


def look_at(
    written: "Written",
    environ: Mapping[str, str],
    run_root: Path | None,
    *,
    other_hosts: bool = False,
    resume: bool = False,
) -> "Looked":
    """Check the inputs that a spec names and, with `resume`, the checkpoint."""
    from orchestrator.app.submission.inputs import look
    from orchestrator.model_config import hub_cache

    spec, hub = written.spec, hub_cache(environ)
    if isinstance(spec, ScriptSpec):
        from orchestrator.app.submission.program_check import look_at_program

        # A program resumes as it likes, so only its own checks are left to the ranks.
        return look_at_program(spec, environ, other_hosts=other_hosts)
    assert isinstance(spec, JobSpec)
    looked = look(spec, hub, other_hosts=other_hosts)
    if not resume:
        return looked
    from orchestrator.app.submission.resume_check import look_back
    from orchestrator.contract.files.run_dir import RunDir
    from orchestrator.job_paths import run_root_of

    root = run_root_of(None if run_root is None else str(run_root), environ, spec.run_root)
    run_dir = RunDir((root / spec.name).absolute())
    return looked | look_back(spec, _config_of(spec, hub), run_dir, environ)


def _config_of(spec: JobSpec, hub: Path) -> Mapping[str, Any] | None:
    """The model config; None if it cannot be read, which planning reports."""
    from orchestrator.model_config import read_model_config

    try:
        return read_model_config(spec.model, hub)
    except SpecError:
        return None


def _as_given(written: "Written", given: Given) -> tuple[str, ...]:
    """Overrides from the nodes of the allocation, for keys that the spec does not set."""
    cluster = written.document.data.get("cluster") or {}
    spare = written.spec.cluster.spare_hosts
    hosts = max(1, len(given.nodes) - spare)
    found = ["cluster.backend=slurm"]
    if "hosts" not in cluster:
        found.append(f"cluster.hosts={hosts}")
    if "gpus_per_host" not in cluster and given.devices:
        found.append(f"cluster.gpus_per_host={given.devices}")
    return tuple(found)


def _planned(
    written: "Written",
    environ: Mapping[str, str],
    inventory: Path | None,
    run_root: Path | None,
    purpose: Purpose | Given,
) -> Planned:
    spec = _with_folder(written.spec)
    problems = tuple(mistakes(spec.cluster, inventory, purpose))
    if problems:
        raise written.refused(problems)
    config = _model_config(written, environ)
    if isinstance(purpose, Given):
        found = planned_as_given(spec, config, environ, purpose)
    else:
        found = planned_hosts(spec, config, environ, inventory, purpose, run_root)
    return Planned(
        spec=found.spec,
        plan=found.plan,
        inventory=found.inventory,
        model_config=config,
        written=written,
        notes=(*written.from_user, *found.notes),
    )


def spec_beside(
    path: Path, overrides: Sequence[str], asked: Sequence[str], environ: Mapping[str, str]
) -> JobSpec:
    """The spec with the mesh that `asked` fixes: items like `pp=4` or `KEY=VALUE`.

    Raises:
        SpecError: with everything that is wrong in the file, in `overrides` and in `asked`.
    """
    from orchestrator.load import of_the_trainer, read_spec

    # A key without a dot is one of `parallel`, also if it has a typo: no value is at the top.
    keys = [one if "." in one.split("=")[0] else f"parallel.{one}" for one in asked]
    fixed = [f"--explain {one}" for one in keys]
    return of_the_trainer(read_spec(path, (*overrides, *fixed), environ), "plan --explain")


def beside_plan(planned: Planned, spec: JobSpec) -> "Beside":
    """The mesh of `spec`, which `spec_beside` returned, beside the plan."""
    from orchestrator.plan.beside import beside

    spec = replace(spec, cluster=planned.spec.cluster)
    return beside(planned.plan, spec, planned.inventory, planned.model_config)


def with_prices(planned: Planned) -> Planned:
    """With what the fixed keys of the spec cost."""
    from orchestrator.plan import planner

    # ndctl does not know how fast the user's own program is.
    if not isinstance(planned.spec, JobSpec):
        return planned
    priced = planner.with_prices(
        planned.plan, planned.spec, planned.inventory, planned.model_config
    )
    return replace(planned, plan=priced)


def _with_folder(spec: CommonSpec) -> CommonSpec:
    """`spec` with an absolute working directory of the program, if this machine has it."""
    if not isinstance(spec, ScriptSpec) or spec.cluster.backend == "kubernetes":
        return spec
    return replace(spec, run=replace(spec.run, workdir=str(Path(spec.run.workdir).absolute())))


def _model_config(written: "Written", environ: Mapping[str, str]) -> Mapping[str, Any]:
    """The model's config, which describes a model that can be planned; empty for the user's own
    program."""
    from orchestrator.model_config import hub_cache, read_model_config
    from orchestrator.plan.model.families import shape_of

    if not isinstance(written.spec, JobSpec):
        return {}
    key = "model.path" if written.spec.model.config is None else "model.config"
    try:
        config = read_model_config(written.spec.model, hub_cache(environ))
        shape_of(config)
        return config
    except (SpecError, PlanError) as exc:
        place = written.document.place_of(key)
        before = lead(place, key) if exc.message.startswith(f"{key}: ") else f"{place}: "
        raise type(exc)(f"{before}{exc.message}", fix=exc.fix) from exc


class CountedHosts(Struct, frozen=True, kw_only=True):
    """Hosts, and notes on how they were counted."""

    inventory: "Inventory"
    notes: tuple[str, ...] = ()


def inventory_at(
    file: Path | None,
    environ: Mapping[str, str],
    backend: str = "local",
    partition: str | None = None,
    context: str | None = None,
) -> CountedHosts:
    """The hosts in `file`, else those of `backend`."""
    if file is None and backend == "slurm":
        from orchestrator.backends.slurm.inventory import read_cluster
        from orchestrator.inventory.slurm.gpus import gpu_table
        from orchestrator.inventory.slurm.inventory import Use

        found = read_cluster(slurm(), partition, whole=True, at="--partition")
        return CountedHosts(inventory=found.inventory(gpu_table(environ), Use()))
    if file is None and backend == "kubernetes":
        return _kubernetes_inventory(environ, context)
    if file is None:
        from orchestrator.inventory.local import this_machine

        return CountedHosts(inventory=this_machine(environ))
    from orchestrator.inventory.file import read_inventory

    return CountedHosts(inventory=read_inventory(file))


def _kubernetes_inventory(environ: Mapping[str, str], context: str | None) -> CountedHosts:
    from orchestrator.backends.kubernetes.inventory import read_cluster, usual
    from orchestrator.inventory.kubernetes.gpus import gpu_table

    seen = read_cluster(kubernetes_api(context, environ))
    return CountedHosts(inventory=seen.inventory(gpu_table(environ), usual(seen)), notes=seen.notes)


def zero_of(
    path: Path, overrides: Sequence[str], environ: Mapping[str, str], inventory: Path | None
) -> "ZeroTable":
    """Memory of the ZeRO stages on as many devices as the job has, even if it does not fit."""
    from orchestrator.load import of_the_trainer, read_spec
    from orchestrator.model_config import hub_cache, read_model_config
    from orchestrator.plan.model.families import shape_of
    from orchestrator.plan.show.zero import ZeroTable

    spec = of_the_trainer(read_spec(path, overrides, environ), "plan --zero")
    shape = shape_of(read_model_config(spec.model, hub_cache(environ)))
    devices = spec.cluster.hosts * spec.cluster.gpus_per_host
    fabric = inventory_for(spec, environ, inventory).fabric(spec.cluster.gpus_per_host)
    real = inventory is not None or spec.cluster.gpu or spec.cluster.backend != "local"
    limit = fabric.profile.memory_bytes if fabric and real else None
    return ZeroTable.of(shape, devices, spec.train.optimizer, limit)
