"""What a checkpoint holds, as one flat dictionary that any mesh can cut anew.

model.<parameter>                the master weights, of adapters alone where only they are trained
optimizer.<parameter>.<moment>   the optimizer's moments and step count
rng.<rank>, rng.<rank>.cuda      random state of each rank; only a world as large reads it back
progress                         JSON of `Progress`
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from orchestrator.contract.codec import decode
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What decides which tokens a step reads; a job that goes on must not change it."""

    seed: int
    global_batch_size: int
    sequence_length: int
    data: str
    """Fingerprint of the files."""
    base: str = ""
    """The frozen model under adapters, which a checkpoint does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the weights mean, so that a checkpoint can be exported without its run."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Of transformers."""
    tokenizer: str = ""
    """As `data.tokenizer` named it."""
    lora: LoraSpec | None = None
    """Of the adapters, where only they are trained."""
    base: str | None = None
    """Where the frozen model under them came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the job stands: schedule and data position follow from the step."""

    step: int
    stream: Stream
    skips: Skips = field(default_factory=Skips)
    origin: Origin = field(default_factory=Origin)
    skipped: tuple[Window, ...] = ()
    """Data that was left out on purpose, or was to be."""
    spikes: Spikes = field(default_factory=Spikes)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        progress: Progress = decode(cls, read_json(text))
        return progress


Named = tuple[tuple[str, nn.Parameter], ...]


def trained_parameters(stages: Iterable[Decoder]) -> Named:
    """Which parameters are trained, and so saved, gone on with and exported; frozen ones are not.

    To be asked while no layer is gathered: FSDP puts other parameters in the modules meanwhile.
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
    """The trained ones of this rank's stages, by their names in the transformers model."""
    optimizer: torch.optim.Optimizer
    stream: Stream
    origin: Origin
    ranks: Ranks
    skips: Skips = field(default_factory=Skips)
    spikes: Spikes = field(default_factory=Spikes)
    skipped: tuple[Window, ...] = ()

    def snapshot(self, step: int) -> dict[str, Any]:
        """Everything that `step` finished steps amount to."""
        progress = Progress(
            step=step,
            stream=self.stream,
            skips=self.skips,
            origin=self.origin,
            skipped=self.skipped,
            spikes=self.spikes,
        )
        return {**self.tensors(), **self.random(), PROGRESS: progress.to_json()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments; loading into these tensors is loading the state."""
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
