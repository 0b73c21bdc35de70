"""What a checkpoint holds, as one flat dictionary that any mesh can cut anew.

model.<parameter>                the master weights, of adapters alone where only they are trained
optimizer.<parameter>.<moment>   the optimizer's moments and step count
rng.<rank>, rng.<rank>.cuda      random state of each rank; only a world as large reads it back
progress                         JSON of `Progress`
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from trainer.guard import Skips
from trainer.model.decoder import Decoder
from trainer.parallel.data import updated_as
from trainer.ranks import Ranks

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
class Progress:
    """Where the job stands: schedule and data position follow from the step."""

    step: int
    stream: Stream
    skips: Skips

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Progress":
        values = json.loads(text)
        return cls(
            step=values["step"], stream=Stream(**values["stream"]), skips=Skips(**values["skips"])
        )


@dataclass(frozen=True, slots=True)
class TrainingState:
    stages: Sequence[Decoder]
    optimizer: torch.optim.Optimizer
    stream: Stream
    ranks: Ranks
    skips: Skips = field(default_factory=Skips)

    def snapshot(self, step: int) -> dict[str, Any]:
        """Everything that `step` finished steps amount to."""
        progress = Progress(step=step, stream=self.stream, skips=self.skips)
        return {**self.tensors(), **self.random(), PROGRESS: progress.to_json()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and moments; loading into these tensors is loading the state."""
        tensors: dict[str, torch.Tensor] = {}
        for stage in self.stages:
            for name, parameter in stage.plain_parameters():
                if not parameter.requires_grad:
                    continue
                tensors[f"model.{name}"] = parameter.detach()
                for key, value in self.optimizer.state[updated_as(parameter)].items():
                    tensors[f"optimizer.{name}.{key}"] = value
        return tensors

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
