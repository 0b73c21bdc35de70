"""Writes the metrics to `metrics.jsonl` and, if configured, to TensorBoard and Weights & Biases.

If one of these two fails, it gets no more metrics, and training continues.
"""

import hashlib
import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ndctl.rank.fence import Admit, admit_all
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.contract.spec.train_spec import TrainSpec
from orchestrator.errors import TrainingError
from trainer.measure.metrics import MetricsFile, StepMetrics

LOG = logging.getLogger("trainer")


class Writer(Protocol):
    def write(self, step: int, figures: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Report:
    """Exists on rank 0 only, because the totals are the same on every rank."""

    def __init__(self, file: MetricsFile, writers: dict[str, Writer]) -> None:
        self._file = file
        self._writers = writers

    def write(self, *steps: StepMetrics) -> None:
        """Write the metrics of consecutive steps.

        Raises:
            GivenUp: a later attempt has started; nothing was written.
        """
        self._file.append(*steps)
        for metrics in steps:
            figures = _figures(metrics)
            for name, writer in [*self._writers.items()]:
                self._try(name, partial(writer.write, metrics.step, figures))

    def close(self) -> None:
        self._file.close()
        for name, writer in [*self._writers.items()]:
            self._try(name, writer.close)

    def _try(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as exc:  # noqa: BLE001 (foreign code may raise anything)
            LOG.warning("stopped writing metrics to %s: %s", name, exc)
            del self._writers[name]


def _figures(metrics: StepMetrics) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.to_dict().items()
        if value is not None and name not in ("step", "time")
    }


def check_writers(train: TrainSpec) -> None:
    """Raises TrainingError if a package is missing that the configuration needs."""
    wanted = {"tensorboard": train.tensorboard, "wandb": train.wandb is not None}
    for package, asked in wanted.items():
        if asked and importlib.util.find_spec(package) is None:
            raise TrainingError(
                f"train.{package} is set, but the Python package {package} is not installed",
                fix=f"pip install 'ndctl[{package}]', or remove train.{package}",
            )


def open_report(run: RunDir, train: TrainSpec, done: int, admit: Admit = admit_all) -> Report:
    """The report of a job that has done `done` steps. A writer that fails to start is left out."""
    makers: dict[str, Callable[[], Writer]] = {}
    if train.tensorboard:
        makers["TensorBoard"] = lambda: TensorBoard(run.path / "tensorboard", done)
    if (project := train.wandb) is not None:
        makers["Weights & Biases"] = lambda: WeightsAndBiases(run.path, project)
    writers: dict[str, Writer] = {}
    for name, make in makers.items():
        try:
            writers[name] = make()
        except Exception as exc:  # noqa: BLE001 (foreign code may raise anything)
            LOG.warning("failed to start %s, which gets no metrics: %s", name, exc)
    return Report(MetricsFile(run.metrics, admit), writers)


class TensorBoard:
    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step removes what an earlier attempt wrote for the steps that are now repeated.
        self._writer = SummaryWriter(str(folder), purge_step=done + 1, flush_secs=10)

    def write(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run directory, which all attempts share.

    API key, entity and mode come from W&B's own environment variables (WANDB_API_KEY, …).
    """

    def __init__(self, folder: Path, project: str) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(
            project=project,
            name=folder.name,
            id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(folder),
            # The agents already collect the output of ranks.
            settings=wandb.Settings(console="off"),
        )
        # W&B's own step counter never goes back, so it would drop repeated steps.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log({**figures, "step": step})

    def close(self) -> None:
        self._run.finish()
