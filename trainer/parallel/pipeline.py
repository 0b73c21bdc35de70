"""Pipeline parallel: the micro batches of a step travel through stages on the ranks of axis pp.

torch.distributed.pipelining schedules a training step. What the stages hand on is told to it
beforehand: left to find out, it runs a micro batch more, through the loss's sums as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import rank_of_stage, stages_of_rank
from trainer.data.batches import MicroBatch
from trainer.loss import LossSums, TokenLoss
from trainer.measure.timing import Stopwatch
from trainer.model.decoder import Decoder
from trainer.parallel.data import finish_reducing_gradients, reduce_gradients_in_backward
from trainer.parallel.passes import free_gathered, loss_context
from trainer.parallel.tied import TiedWeight
from trainer.rank.ranks import Ranks

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True, slots=True)
class Line:
    """The pipeline as one of its ranks sees it."""

    spec: PipelineSpec
    group: dist.ProcessGroup
    hidden: torch.Tensor
    """Like what one stage hands to the next of a micro batch, without storage: [batch, tokens,
    features], the tokens cut over tp."""
    device: torch.device

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def num_stages(self) -> int:
        return self.size * self.spec.stages

    @property
    def mine(self) -> list[int]:
        return stages_of_rank(self.spec, self.size, dist.get_rank(self.group))

    def rank_of(self, stage: int) -> int:
        return rank_of_stage(self.spec, self.size, stage)


def make_line(config: TrainingConfig, features: int, tokens: int, ranks: Ranks) -> Line:
    """`tokens` are those of a sequence that this rank reads."""
    shape = (config.micro_batch_size, tokens // ranks.tp, features)
    hidden = torch.empty(
        shape, dtype=getattr(torch, config.train.dtype), device="meta", requires_grad=True
    )
    group = ranks.mesh["pp"].get_group()
    return Line(config.parallel.pipeline, group, hidden, ranks.device)


class Pipeline:
    """`Passes` through the stages of this rank, which are in the order of the model."""

    def __init__(  # noqa: PLR0913 - what a rank's part of a line is made of
        self,
        stages: Sequence[Decoder],
        line: Line,
        loss: TokenLoss,
        tied: TiedWeight,
        micro_batches: int,
        tensor_parallel: bool,
        watch: Stopwatch,
    ) -> None:
        self._watch = watch
        self._stages = dict(zip(line.mine, stages, strict=True))
        self._line = line
        self._loss = loss
        self._tied = tied
        self._tensor_parallel = tensor_parallel
        self._schedule = _schedule(self._stages, line, loss, micro_batches)

    @property
    def _has_first(self) -> bool:
        return 0 in self._stages

    @property
    def _has_last(self) -> bool:
        return self._line.num_stages - 1 in self._stages

    def train(self, batches: Sequence[MicroBatch]) -> LossSums:
        inputs = [torch.cat([batch.inputs_BT for batch in batches])] if self._has_first else []
        labels = torch.cat([batch.labels_BT for batch in batches]) if self._has_last else None
        for decoder in self._stages.values():
            reduce_gradients_in_backward(decoder, last=False)
        self._watch.enters()
        with loss_context(self._tensor_parallel):
            # Gradients that FSDP shards it reduces itself, after each stage's last backward pass.
            self._schedule.step(*inputs, target=labels, return_outputs=False)
        for decoder in self._stages.values():
            finish_reducing_gradients(decoder)
        self._tied.add_gradients()
        return self._loss.take()

    def evaluate(self, batches: Sequence[MicroBatch]) -> LossSums:
        """In step with all ranks: at each tick every stage does the micro batch after its last.

        Of its own, for torch's schedules want the number of micro batches that they were made with,
        and those of V-shaped stages fail an assertion of theirs without a backward pass.
        """
        arrived: dict[int, torch.Tensor] = {}
        with torch.no_grad(), loss_context(self._tensor_parallel):
            for tick in range(len(batches) + self._line.num_stages - 1):
                leaving = {}
                for stage, decoder in self._stages.items():
                    if 0 <= tick - stage < len(batches):
                        batch = batches[tick - stage]
                        inputs = batch.inputs_BT if decoder.part.is_first else arrived[stage]
                        leaving[stage] = decoder(inputs)
                        if decoder.part.is_last:
                            self._loss(leaving.pop(stage), batch.labels_BT)
                due = [s for s in self._stages if s > 0 and 0 <= tick + 1 - s < len(batches)]
                arrived = _handed_on(self._line, leaving, due)
        for decoder in self._stages.values():
            free_gathered(decoder)
        return self._loss.take()


def _schedule(stages: dict[int, Decoder], line: Line, loss: TokenLoss, micro_batches: int) -> Any:
    pipeline_stages = [
        PipelineStage(
            decoder,
            index,
            line.num_stages,
            line.device,
            input_args=(line.hidden,) if index else (_ids_like(line.hidden),),
            output_args=(line.hidden,),
            group=line.group,
        )
        for index, decoder in stages.items()
    ]
    several = line.spec.stages > 1
    if several:
        # These schedules gather and free whole stages themselves. And zbv computes the gradients of
        # weights by a walk from the very tensors that the forward pass used: of weights freed in
        # between it finds none, and says nothing.
        for decoder in stages.values():
            if isinstance(decoder, FSDPModule):
                decoder.set_reshard_after_forward(False)
    # The loss is already divided by the tokens of the whole step.
    return SCHEDULES[line.spec.schedule](
        pipeline_stages if several else pipeline_stages[0],
        n_microbatches=micro_batches,
        loss_fn=loss,
        scale_grads=False,
    )


def _ids_like(hidden_BTD: torch.Tensor) -> torch.Tensor:
    return torch.empty(hidden_BTD.shape[:2], dtype=torch.long, device="meta")


def _handed_on(
    line: Line, leaving: dict[int, torch.Tensor], due: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Send each output of a stage in `leaving` to the next; returns the inputs of those `due`."""
    arrived = {}
    transfers = []
    here = dist.get_rank(line.group)
    # Both ends list the transfers between them in the order of the stages.
    for stage, hidden in leaving.items():
        if (there := line.rank_of(stage + 1)) == here:
            arrived[stage + 1] = hidden
        else:
            transfers.append(
                dist.P2POp(dist.isend, hidden.contiguous(), group=line.group, group_peer=there)
            )
    for stage in due:
        if (there := line.rank_of(stage - 1)) != here:
            arrived[stage] = torch.empty_like(line.hidden, device=line.device, requires_grad=False)
            transfers.append(
                dist.P2POp(dist.irecv, arrived[stage], group=line.group, group_peer=there)
            )
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()
    return arrived
