"""The content of a checkpoint: one flat dictionary, which any mesh can reshard.

model.<parameter>                master weights; of the adapters only, if only they are trained
optimizer.<parameter>.<moment>   moments and step count of the optimizer
rng.<rank>, rng.<rank>.cuda      random state of each rank; used only if the world size is the same
progress                         JSON of `Progress`
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from orchestrator.contract.codec import decode, encode
from orchestrator.contract.read_json import read_json
from orchestrator.contract.skipped_batches import Window
from orchestrator.contract.spec.model_spec import LoraSpec
from trainer.guard import Skips, Spikes
from trainer.model.decoder import Decoder
from trainer.parallel.data import updated_as
from trainer.rank.ranks import Ranks

MODEL = "model."
OPTIMIZER = "optimizer."
PROGRESS = "progress"


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides which tokens a step reads, and which of them each one sees. It must
    not change at a resume."""

    seed: int
    global_batch_size: int
    sequence_length: int
    data: str
    """Fingerprint of the files."""
    base: str = ""
    """Fingerprint of the frozen model under adapters, which is not in the checkpoint."""
    document_mask: bool = False


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What an export needs besides the weights, so that it does not need the run directory."""

    config: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """Model config of transformers."""
    tokenizer: str = ""
    """The value of `data.tokenizer`."""
    lora: LoraSpec | None = None
    """Set if only adapters are trained."""
    base: str | None = None
    """Source of the frozen model under the adapters."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the job. The learning rate and the data position follow from the step."""

    step: int
    stream: Stream
    skips: Skips = msgspec.field(default_factory=Skips)
    origin: Origin = msgspec.field(default_factory=Origin)
    skipped: tuple[Window, ...] = ()
    """Data that is skipped on purpose, in the past or in the future."""
    spikes: Spikes = msgspec.field(default_factory=Spikes)

    def to_json(self) -> str:
        return json.dumps(encode(self))

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        progress: Progress = decode(cls, read_json(text))
        return progress


Named = tuple[tuple[str, nn.Parameter], ...]


def trained_parameters(stages: Iterable[Decoder]) -> Named:
    """The trained parameters: these are saved, loaded and exported, and frozen ones are not.

    Call it while no layer is gathered: FSDP replaces the parameters of a gathered module.
    """
    return tuple(
        (name, parameter)
        for stage in stages
        for name, parameter in stage.plain_parameters()
        if parameter.requires_grad
    )


@dataclass(frozen=True, slots=True)
class TrainingState:
    parameters: Sequence[tuple[str, nn.Parameter]]
    """Trained parameters of this rank's stages, by their names in the transformers model."""
    optimizer: torch.optim.Optimizer
    stream: Stream
    origin: Origin
    ranks: Ranks
    skips: Skips = field(default_factory=Skips)
    spikes: Spikes = field(default_factory=Spikes)
    skipped: tuple[Window, ...] = ()

    def snapshot(self, step: int) -> dict[str, Any]:
        """The content of the checkpoint after `step`."""
        return {**self.tensors(), **self.random(), PROGRESS: self.progress(step).to_json()}

    def progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            stream=self.stream,
            skips=self.skips,
            origin=self.origin,
            skipped=self.skipped,
            spikes=self.spikes,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments. They share the state's memory, so a load into them restores it."""
        return dict(self._tensors())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.parameters:
            yield f"{MODEL}{name}", parameter.detach()
            for key, value in self.optimizer.state[updated_as(parameter)].items():
                yield f"{OPTIMIZER}{name}.{key}", value

    def random(self) -> dict[str, torch.Tensor]:
        name = f"rng.{self.ranks.env.rank}"
        states = {name: torch.get_rng_state()}
        if self.ranks.device.type == "cuda":
            states[f"{name}.cuda"] = torch.cuda.get_rng_state()
        return states

    def set_random(self, states: dict[str, torch.Tensor]) -> None:
        for name, value in states.items():
            if name.endswith(".cuda"):
                torch.cuda.set_rng_state(value)
            else:
                torch.set_rng_state(value)
