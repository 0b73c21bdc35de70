"""Pipeline trainings that evaluate the micro batches of each step before they train on them.

A case is `{"config": …}`. Its answer has, for each rank, a list of one `StepRecord` per step.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from orchestrator.contract.files.env import RankEnv
from tests.trainer.launch import training_worker
from trainer.data.batches import MicroBatch
from trainer.loss import LossSums
from trainer.model.regions import local_part
from trainer.parallel.pipeline import Pipeline
from trainer.parallel.tied import TiedWeight


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one rank computed and held in one step."""

    evaluated: tuple[float, float]
    trained: tuple[float, float]
    """Sum of losses, and number of tokens; `evaluated` has the same."""
    copies: list[str]
    """Hashes of the rank's copies of a tied matrix before the step."""
    left_gathered: int
    """Number of parameters that evaluation left gathered instead of sharded."""


def numbers(sums: LossSums) -> tuple[float, float]:
    return sums.loss.item(), sums.tokens.item()


def digests(tied: TiedWeight) -> list[str]:
    parts = [local_part(weight.detach()).contiguous().numpy() for weight in tied.weights]
    return [hashlib.sha256(part.tobytes()).hexdigest() for part in parts]


def parameters(pipeline: Pipeline) -> list[nn.Parameter]:
    return [p for stage in pipeline._stages.values() for p in stage.parameters()]


@contextmanager
def evaluating_first(seen: list[StepRecord]) -> Iterator[None]:
    train = Pipeline.train

    def evaluate_and_train(self: Pipeline, batches: Sequence[MicroBatch]) -> LossSums:
        copies = digests(self._tied)
        shards = {id(parameter) for parameter in parameters(self)}
        # One micro batch more than the schedule expects.
        more = numbers(self.evaluate([*batches, batches[0]]))
        once = numbers(self.evaluate(batches[:1]))
        left = sum(id(parameter) not in shards for parameter in parameters(self))
        sums = train(self, batches)
        evaluated = more[0] - once[0], more[1] - once[1]
        seen.append(StepRecord(evaluated, numbers(sums), copies, left))
        return sums

    with mock.patch.object(Pipeline, "train", evaluate_and_train):
        yield


def run_case(case: dict[str, Any], env: RankEnv) -> list[list[dict[str, Any]]]:
    seen: list[StepRecord] = []
    with evaluating_first(seen):
        training_worker.run_case(case, env)
    everyone: list[Any] = [None] * env.world_size
    dist.all_gather_object(everyone, [asdict(step) for step in seen])
    return everyone
