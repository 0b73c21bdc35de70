"""Pipeline parallel: micro batches pass through stages on the ranks of axis pp.

torch.distributed.pipelining schedules a training step. It gets the shapes of the stages' outputs in
advance. To infer them, it would run one more micro batch, which would also count in the loss sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

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
from torch.distributed.pipelining._backward import stage_backward

from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.spec.parallel_spec import PipelineSpec
from orchestrator.contract.spec.pipeline_spec import SPLITS_BACKWARD, rank_of_stage, stages_of_rank
from trainer.data.batches import MicroBatch
from trainer.data.documents import concatenated
from trainer.loss import LossSums, TokenLoss
from trainer.measure.timing import Stopwatch
from trainer.model.decoder import Decoder
from trainer.parallel.data import finish_reducing_gradients, reduce_gradients_in_backward
from trainer.parallel.passes import free_gathered
from trainer.parallel.tied import TiedWeight
from trainer.rank.ranks import Ranks

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


@dataclass(frozen=True, slots=True)
class PipelineRank:
    """The pipeline from the view of one rank."""

    spec: PipelineSpec
    group: dist.ProcessGroup
    reduce: str
    """See `FsdpSpec.reduce_gradients`."""
    hidden: torch.Tensor
    """A meta tensor with the shape that one stage sends to the next: [batch, tokens, features],
    with the tokens sharded over tp."""
    device: torch.device

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def num_stages(self) -> int:
        return self.size * self.spec.stages

    @property
    def own_stages(self) -> list[int]:
        return stages_of_rank(self.spec, self.size, dist.get_rank(self.group))

    def rank_of(self, stage: int) -> int:
        return rank_of_stage(self.spec, self.size, stage)


def pipeline_rank(config: TrainingConfig, features: int, tokens: int, ranks: Ranks) -> PipelineRank:
    """`tokens` is the number of tokens of a sequence that this rank reads."""
    shape = (config.micro_batch_size, tokens // ranks.tp, features)
    hidden = torch.empty(
        shape, dtype=getattr(torch, config.train.compute_dtype), device="meta", requires_grad=True
    )
    group = ranks.mesh["pp"].get_group()
    parallel = config.parallel
    return PipelineRank(parallel.pipeline, group, parallel.fsdp.reduce, hidden, ranks.device)


class Pipeline:
    """`Passes` for a pipeline. `stages` are those of this rank, in the order of the model."""

    def __init__(
        self,
        stages: Sequence[Decoder],
        rank: PipelineRank,
        loss: TokenLoss,
        tied: TiedWeight,
        micro_batches: int,
        watch: Stopwatch,
    ) -> None:
        self._watch = watch
        self._stages = dict(zip(rank.own_stages, stages, strict=True))
        self._rank = rank
        self._loss = loss
        self._tied = tied
        for decoder in stages:
            decoder.loss = loss
        self._schedule = _schedule(self._stages, rank, micro_batches)

    @property
    def _has_first(self) -> bool:
        return 0 in self._stages

    @property
    def _has_last(self) -> bool:
        return self._rank.num_stages - 1 in self._stages

    def train(self, batches: Sequence[MicroBatch]) -> LossSums:
        inputs = [torch.cat([batch.inputs_BT for batch in batches])] if self._has_first else []
        labels = torch.cat([batch.labels_BT for batch in batches]) if self._has_last else None
        for decoder in self._stages.values():
            reduce_gradients_in_backward(decoder, last=False)
        self._watch.before_collective()
        # The last stage gets the labels twice: for its forward pass, which computes the loss, and
        # because the schedules demand a target.
        given: dict[str, Any] = {} if labels is None else {"labels": labels}
        if documents := concatenated(batch.documents for batch in batches):
            given["documents"] = documents
        # The schedule makes FSDP reduce its gradients after each stage's last backward pass.
        self._schedule.step(*inputs, target=labels, return_outputs=False, **given)
        for decoder in self._stages.values():
            finish_reducing_gradients(decoder)
        self._tied.add_gradients()
        return self._loss.pop_sums()

    def evaluate(self, batches: Sequence[MicroBatch]) -> LossSums:
        """In each tick, all stages process their next micro batch and send it to the next stage.

        This does not use torch's schedules: they accept only the number of micro batches that they
        were created with, and V-shaped ones fail an assertion without a backward pass.
        """
        arrived: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for tick in range(len(batches) + self._rank.num_stages - 1):
                outputs = {}
                for stage, decoder in self._stages.items():
                    if 0 <= tick - stage < len(batches):
                        batch = batches[tick - stage]
                        inputs = batch.inputs_BT if decoder.part.is_first else arrived[stage]
                        if decoder.part.is_last:
                            decoder(inputs, batch.labels_BT, batch.documents)
                        else:
                            outputs[stage] = decoder(inputs, documents=batch.documents)
                expected = [s for s in self._stages if s > 0 and 0 <= tick + 1 - s < len(batches)]
                arrived = _send_to_next_stages(self._rank, outputs, expected)
        for decoder in self._stages.values():
            free_gathered(decoder)
        return self._loss.pop_sums()


class ReducingStage(PipelineStage):
    """An FSDP stage that reduces its gradients in each backward pass. torch's stage sums whole
    gradients and reduces them in the last one."""

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        stage = cast(FSDPModule, self.submod)
        # FSDP would keep the last buffer of the reduction until the next backward pass.
        stage.set_is_last_backward(True)
        stage.set_reshard_after_backward(False)
        stage.set_requires_gradient_sync(True)
        # Replicas average their shards once, after the sum over the micro batches.
        stage.set_requires_all_reduce(last_backward)
        values = (bwd_kwargs[key] for key in ("stage_output", "output_grads", "input_values"))
        return stage_backward(*values), None


def _stage_class(decoder: Decoder, spec: PipelineSpec, reduce: str) -> type[PipelineStage]:
    # zbv computes the gradients of weights after FSDP's hooks have run.
    each = reduce == "each" and spec.schedule != SPLITS_BACKWARD
    return ReducingStage if each and isinstance(decoder, FSDPModule) else PipelineStage


def _schedule(stages: dict[int, Decoder], rank: PipelineRank, micro_batches: int) -> Any:
    pipeline_stages = [
        _stage_class(decoder, rank.spec, rank.reduce)(
            decoder,
            index,
            rank.num_stages,
            rank.device,
            input_args=(rank.hidden,) if index else (_ids_like(rank.hidden),),
            output_args=(rank.hidden,),
            group=rank.group,
        )
        for index, decoder in stages.items()
    ]
    several = rank.spec.stages > 1
    if several:
        # These schedules gather and free whole stages themselves. zbv also finds the gradients of
        # weights through the tensors of the forward pass: it would silently skip weights that were
        # freed in between.
        for decoder in stages.values():
            if isinstance(decoder, FSDPModule):
                decoder.set_reshard_after_forward(False)
    # The loss is already divided by the tokens of the whole step.
    return SCHEDULES[rank.spec.schedule](
        pipeline_stages if several else pipeline_stages[0],
        n_microbatches=micro_batches,
        loss_fn=_output_as_loss,
        scale_grads=False,
    )


def _output_as_loss(output: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    return output


def _ids_like(hidden_BTD: torch.Tensor) -> torch.Tensor:
    return torch.empty(hidden_BTD.shape[:2], dtype=torch.long, device="meta")


def _send_to_next_stages(
    rank: PipelineRank, outputs: dict[int, torch.Tensor], expected: Sequence[int]
) -> dict[int, torch.Tensor]:
    """Send each stage's output to the next stage; returns the inputs of the `expected` stages."""
    arrived = {}
    transfers = []
    own = dist.get_rank(rank.group)
    # Both peers list the transfers between them in the order of the stages, so that they match.
    for stage, hidden in outputs.items():
        if (peer := rank.rank_of(stage + 1)) == own:
            arrived[stage + 1] = hidden
        else:
            transfers.append(
                dist.P2POp(dist.isend, hidden.contiguous(), group=rank.group, group_peer=peer)
            )
    for stage in expected:
        if (peer := rank.rank_of(stage - 1)) != own:
            arrived[stage] = torch.empty_like(rank.hidden, device=rank.device, requires_grad=False)
            transfers.append(
                dist.P2POp(dist.irecv, arrived[stage], group=rank.group, group_peer=peer)
            )
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()
    return arrived
