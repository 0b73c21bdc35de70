"""`training_worker.py` with the faults and data of the tests of the training loop.

A training that diverges answers with the `error` that ended it, its `message`, and `since`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from orchestrator.contract.files.env import RankEnv
from tests.trainer.launch import training_worker
from trainer import main as main_module
from trainer import step as step_module
from trainer.data.batches import Batches, MicroBatch, StepBatches
from trainer.gradients import Parts, local_gradients
from trainer.guard import Unstable
from trainer.model.chunked_loss import NOT_LEARNED
from trainer.step import Stepper, Totals


def uneven(batch: MicroBatch) -> MicroBatch:
    """Mask the first 0 to 29 tokens of a sequence, depending on its content."""
    labels_BT = batch.labels_BT.clone()
    for inputs_T, labels_T in zip(batch.inputs_BT, labels_BT, strict=True):
        labels_T[: int(inputs_T[:4].sum()) % 30] = NOT_LEARNED
    return dataclasses.replace(batch, labels_BT=labels_BT)


def unlearned(batch: MicroBatch) -> MicroBatch:
    return dataclasses.replace(batch, labels_BT=torch.full_like(batch.labels_BT, NOT_LEARNED))


class Uneven(Batches):
    """Some tokens of each step are not learned. In step 3 no token is learned."""

    def read_step(self, step: int) -> StepBatches:
        read = Batches.read_step(self, step)
        mask = unlearned if step == 3 else uneven
        return dataclasses.replace(read, micro_batches=[mask(it) for it in read.micro_batches])


class HeldOut(Batches):
    """Evaluates on the data that training would read from its 100th step on."""

    def evaluation(self, sequences: int | None) -> Iterator[list[MicroBatch]]:
        for step in range(100, 100 + (sequences or 16) // self.global_batch_size):
            yield [uneven(batch) for batch in self.of_step(step)]


class Watched(Stepper):
    """Makes gradients of the case's `poison` steps NaN, and asserts that a skipped update changes
    neither a weight nor the optimizer.
    """

    def run(self, step: int, *rest: Any) -> Totals:
        before = self.prepare(step)
        totals = super().run(step, *rest)
        self.check(step, totals, before)
        return totals

    def queue(self, step: int, *rest: Any) -> Callable[[], Totals]:
        before = self.prepare(step)
        read = super().queue(step, *rest)
        self.check(step, read(), before)  # on a CPU nothing is still being computed
        return read

    def prepare(self, step: int) -> list[bytes]:
        poisoned = POISON[0] is not None and step in POISON[0]
        step_module.local_gradients = poison if poisoned else local_gradients  # type: ignore[attr-defined, assignment]
        return self.bits()

    def check(self, step: int, totals: Totals, before: list[bytes]) -> None:
        assert totals.finite == (step not in (POISON[0] or ()))
        assert (before == self.bits()) == (not totals.finite)
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        first, _ = self.parameters[0]
        assert list(totals.bad_gradients) == ([first] if last and not totals.finite else [])

    def bits(self) -> list[bytes]:
        parameters = [p for _, p in self.parameters]
        states = [value for p in parameters for value in self.optimizer.state[p].values()]
        return [bits_of(tensor.detach()) for tensor in [*parameters, *states]]


POISON: list[Any] = [None]


def bits_of(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.reshape(-1).view(torch.uint8).numpy().tobytes()


def poison(parameters: Any, stage_ranks: int, tied: Any) -> Parts:
    """Set one value of the last rank's part of the gradient to NaN."""
    parts = local_gradients(parameters, stage_ranks, tied)
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        parts[0][0].view(-1)[0] = torch.nan
    return parts


def run_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    POISON[0] = case.get("poison")
    try:
        return training_worker.run_case(case, env)
    except Unstable as exc:
        return {"error": type(exc).__name__, "message": str(exc), "since": exc.since}


training_worker.BROKEN.update(
    {
        "uneven": (main_module, "Batches", Uneven),
        "held out": (main_module, "Batches", HeldOut),
        "watched": (main_module, "Stepper", Watched),
    }
)
