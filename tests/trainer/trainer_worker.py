"""Several trainings one after the other on the same ranks, for starting ranks costs seconds.

    python trainer_worker.py CASES ANSWERS

A case is `{"config": …}` and may have `stop_after` (a step after which the rank is asked to leave)
and `broken` (a name in `BROKEN`). Its answer has `code`, the exit code that the trainer would have
had, and `reduces`, how many collectives reduced gradients over the data-parallel ranks.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.tensor.debug import CommDebugMode

from orchestrator.contract.codec import decode
from orchestrator.contract.env import RankEnv
from orchestrator.contract.training import TrainingConfig
from trainer.emit import Reporter
from trainer.main import train_on
from trainer.outside import Outside
from trainer.parallel import tensor
from trainer.process import set_up_logging
from trainer.ranks import arrange, process_group


class StopAfter:
    """Asks the rank to leave once `step` steps are done, as a signal would."""

    def __init__(self, step: int | None, reporter: Reporter) -> None:
        self.step = step
        self.reporter = reporter

    @property
    def asked(self) -> bool:
        return self.step is not None and self.reporter.step + 1 >= self.step


def without_head_norms(layer: Any) -> dict[str, Any]:
    plan = LAYER_PLAN(layer)
    return {name: style for name, style in plan.items() if name[-6:] not in ("q_norm", "k_norm")}


LAYER_PLAN: Callable[[Any], dict[str, Any]] = tensor.layer_plan
BROKEN: dict[str, tuple[str, Any]] = {
    "q and k norms left out of the plan": ("layer_plan", without_head_norms),
    "head not tied again": ("tie_weights", lambda model: None),
}


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    attribute, replacement = BROKEN[name]
    with mock.patch.object(tensor, attribute, replacement):
        yield


def run_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    config: TrainingConfig = decode(TrainingConfig, case["config"])
    reporter = Reporter(env)
    stop: Any = StopAfter(case.get("stop_after"), reporter)
    outside = Outside(env=env, reporter=reporter, drills=(), stop=stop, clock=lambda: 0.0)
    with broken(case.get("broken")), CommDebugMode() as comm:
        code = train_on(arrange(config.mesh, env), config, outside)
    counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    reduces = sum(count for op, count in counts.items() if "_reduce_scatter_base" in op)
    return {"code": code, "reduces": reduces}


def main(cases: Path, answers: Path) -> None:
    env = RankEnv.from_mapping(os.environ)
    set_up_logging()
    with process_group(env):
        done = [run_case(case, env) for case in json.loads(cases.read_text())]
    if env.rank == 0:
        answers.write_text(json.dumps(done))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
