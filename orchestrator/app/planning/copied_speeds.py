"""Records the speed of jobs in clusters whose run root this machine does not see."""

from collections.abc import Mapping

from orchestrator.app.remote import Found
from orchestrator.dashboard.snapshot import Snapshot


def remember_speed(found: Found, snapshot: Snapshot, environ: Mapping[str, str]) -> None:
    """Once the copy of a job has its end, append its speed to the history of this run root, as the
    job's leader did in its own."""
    run = snapshot.seen.run
    if found.copy is None or run.ending is None or run.plan.is_own:
        return
    from orchestrator.backends.kubernetes.mirror.mirror_paths import run_root_above
    from orchestrator.contract.files.trainer_config import TrainingConfig
    from orchestrator.leader.records.speed_writer import append_speed
    from orchestrator.load import of_the_trainer, read_spec
    from orchestrator.model_config import hub_cache, read_model_config
    from orchestrator.plan.training import trainer_config
    from orchestrator.speed_history import path_of

    run_dir = found.run_dir

    def training() -> TrainingConfig:
        spec = of_the_trainer(read_spec(run_dir.spec), "the speed of a job")
        config = read_model_config(spec.model, hub_cache(environ))
        return trainer_config(spec, run.plan, config, "")

    append_speed(path_of(run_root_above(run_dir.path)), run_dir, run, training)
