"""Runs several trainings in order on the same ranks, because starting ranks takes seconds.

A case is `{"config": …}`. Optional keys:
  stop_after   the step after which the rank is asked to stop
  broken       a name in `BROKEN`
  unsaved      write no checkpoint
  count        count the collectives that reduce gradients
  frozen       watch the frozen weights; the case fails if training changes one
  drills       as on a command line
  skip         first and last batch of each window
  refused      the trainer must refuse the configuration

The answer of a case has:
  code             exit code of the trainer
  refused          message of the refusal, or ""
  optimizer_bytes  bytes of optimizer state on rank 0
  groups           number of process groups created beyond those of the mesh
  reduces          with `count`: number of collectives that reduced gradients over the
                   data-parallel ranks
  frozen_bytes     with `frozen`: bytes of frozen weights on this rank
"""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.contract.codec import decode
from orchestrator.contract.drills import parse_drill
from orchestrator.contract.files.env import RankEnv
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.mesh import Mesh
from orchestrator.contract.skipped_batches import Window
from orchestrator.errors import TrainingError
from trainer import gradients
from trainer import main as main_module
from trainer import step as step_module
from trainer.checkpoint.save import Checkpoints
from trainer.config import complete
from trainer.data.batches import Batches
from trainer.gradients import Parts, local_gradients
from trainer.loop import Training, train
from trainer.main import train_on
from trainer.model.decoder import Decoder
from trainer.model.float8 import convert
from trainer.model.regions import local_part
from trainer.optimizer import build_optimizer
from trainer.parallel import buckets, building, ddp, fsdp
from trainer.parallel.building import build_model
from trainer.parallel.tied import TiedWeight
from trainer.rank.ranks import Ranks, arrange, process_group
from trainer.rank.reporter import Reporter
from trainer.rank.runtime import Runtime


class StopAfter:
    """Asks the rank to stop after `step` steps, as a signal does."""

    on_disk, save = True, False

    def __init__(self, step: int | None, reporter: Reporter) -> None:
        self.step = step
        self.reporter = reporter

    @property
    def asked(self) -> bool:
        return self.step is not None and self.reporter.step + 1 >= self.step


class CountReduces(TorchDispatchMode):
    """Counts the collectives that reduce more values than the totals of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.reduces = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "reduce" in str(func) and str(func).startswith("c10d."):
            sizes = [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.reduces += max(sizes) > TOTALS
        return func(*args, **(kwargs or {}))


TOTALS = 20
"""Above the number of values, other than gradients, that a step adds up over the ranks."""


class NeverPartial:
    """Replaces torch's `Partial`. No placement is an instance of it."""


def first_rank_batches(**values: Any) -> Batches:
    return Batches(**{**values, "data_rank": 0})


def chunk_in_order(tokens: int, method: str, cp: int, cp_rank: int) -> torch.Tensor:
    return torch.arange(tokens).chunk(cp)[cp_rank]


def emulated_float8(decoder: Decoder, device: torch.device, config: TrainingConfig) -> None:
    convert(decoder, config, emulate=True)


class Frozen:
    """Compares frozen weights before and after a training."""

    def __init__(self) -> None:
        self.stages: list[Decoder] = []
        self.before: dict[str, torch.Tensor] = {}

    def watch(self) -> ExitStack:
        stack = ExitStack()
        build = build_model

        def build_and_keep(
            config: TrainingConfig, ranks: Ranks, positions_T: torch.Tensor, *, resumed: bool
        ) -> list[Decoder]:
            self.stages = build(config, ranks, positions_T, resumed=resumed)
            return self.stages

        def look_and_train(job: Training, done: int) -> int:
            self.before = {name: part.clone() for name, part in self.parts()}
            return train(job, done)

        stack.enter_context(mock.patch.object(main_module, "build_model", build_and_keep))
        stack.enter_context(mock.patch.object(main_module, "train", look_and_train))
        return stack

    def parts(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, stage in enumerate(self.stages):
            for name, parameter in stage.named_parameters():
                local: Any = parameter
                local = local._local_tensor if isinstance(parameter, DTensor) else local
                inner = getattr(local, "__tensor_flatten__", lambda: ([""], None))()[0]
                if not parameter.requires_grad:
                    for part in inner:
                        value = getattr(local, part) if part else local
                        yield f"{number} {name} {part}", value.detach()

    def answer(self) -> dict[str, Any]:
        after = dict(self.parts())
        changed = [name for name, part in self.before.items() if not torch.equal(part, after[name])]
        assert not changed, changed
        return {"frozen_bytes": sum(part.nbytes for part in after.values())}


def no_waiting(*_: Any) -> Any:
    return lambda: None


def no_gathering(*_: Any) -> None:
    return None


def rounded_otherwise(*given: Any) -> Parts:
    """Gradients with the error of a float32 sum in another order: it is small beside the largest
    values of a parameter's gradient, not beside the smallest."""
    parts = local_gradients(*given)
    seed = torch.Generator().manual_seed(1)
    for part, _ in parts:
        noise = torch.randn(part.shape, generator=seed)
        part.add_(noise * part.abs().max() * torch.finfo(torch.float32).eps / 2)
    return parts


BROKEN: dict[str, tuple[Any, str, Any]] = {
    "summands of a norm's gradient not added up": (gradients, "Partial", NeverPartial),
    "tied gradients not added up": (TiedWeight, "add_gradients", lambda self: None),
    "all ranks read the same": (main_module, "Batches", first_rank_batches),
    "a ring's tokens distributed in order": (main_module, "local_positions", chunk_in_order),
    "float8 is emulated": (building, "apply_float8", emulated_float8),
    "gradients not averaged": (ddp, "all_reduce", no_waiting),
    "updated rows not gathered": (main_module, "gather_after_step", no_gathering),
    # These are not faults. They change the losses as little as another mesh does, or not at all.
    "gradients rounded otherwise": (step_module, "local_gradients", rounded_otherwise),
    "embedding and head too large for the root": (fsdp, "LARGE", 1),
    "each gradient larger than a bucket": (buckets, "BUCKET_BYTES", 1),
}


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    with mock.patch.object(*BROKEN[name]):
        yield


def completed(case: dict[str, Any], world_size: int) -> TrainingConfig:
    config: TrainingConfig = decode(TrainingConfig, case["config"])
    if case.get("broken") != "float8 is emulated":
        return complete(config, world_size)
    # float8 is refused without torch.compile only because it is slow. The emulation needs none.
    asked = config.train
    config = complete(replace(config, train=replace(asked, compile=True)), world_size)
    return replace(config, train=replace(config.train, compile=asked.compile))


@contextmanager
def compiled_afresh(config: TrainingConfig) -> Iterator[None]:
    """Each case compiles its own layers, and fails if they ran without being compiled.

    A process keeps 8 compiled variants of a function. Dynamo runs further ones as they are, and
    only the log says so.
    """
    if not config.train.compile:
        yield
        return
    torch._dynamo.reset()
    counters.clear()
    yield
    assert counters["stats"]["unique_graphs"], "no layer was compiled"
    assert not [why for why in counters["unimplemented"] if "recompile limit" in why]


def run_case(case: dict[str, Any], env: RankEnv) -> dict[str, Any]:
    config = completed(case, env.world_size)
    reporter = Reporter(env)
    stop: Any = StopAfter(case.get("stop_after"), reporter)
    drills = [parse_drill(text, number) for number, text in enumerate(case.get("drills", ()), 1)]
    skip = tuple(Window(first=first, last=last) for first, last in case.get("skip", ()))
    runtime = Runtime(
        env=env, reporter=reporter, drills=drills, stop=stop, skip=skip, clock=lambda: 0.0
    )
    ranks = arranged(config.mesh, env)
    counted, frozen, groups = CountReduces(), Frozen(), dist.get_pg_count()
    with (
        broken(case.get("broken")),
        optimizers_built() as optimizers,
        counted if case.get("count") else nullcontext(),
        frozen.watch() if case.get("frozen") else nullcontext(),
        mock.patch.object(Checkpoints, "save_or_raise") if case.get("unsaved") else nullcontext(),
    ):
        try:
            with compiled_afresh(config):
                code, refused = train_on(ranks, config, runtime), ""
        except TrainingError as exc:
            code, refused = exc.exit_code, str(exc)
    assert bool(refused) == case.get("refused", False), refused
    reporter.close()
    seen = frozen.answer() if case.get("frozen") else {}
    return {
        "code": code,
        "refused": refused,
        "reduces": counted.reduces,
        "groups": dist.get_pg_count() - groups,
        "optimizer_bytes": sum(
            bytes_here(leaf) for built in optimizers for leaf in tree_leaves(built.state)
        ),
        **seen,
    }


def arranged(mesh: Mesh, env: RankEnv) -> Ranks:
    """The ranks of a mesh, whose groups are kept for all its cases: creating them takes long, and
    their threads never end."""
    if mesh not in ARRANGED:
        ARRANGED[mesh] = arrange(mesh, env)
    return dataclasses.replace(ARRANGED[mesh], env=env)


ARRANGED: dict[Mesh, Ranks] = {}


@contextmanager
def optimizers_built() -> Iterator[list[torch.optim.Optimizer]]:
    built: list[torch.optim.Optimizer] = []

    def keep(*given: Any) -> torch.optim.Optimizer:
        built.append(build_optimizer(*given))
        return built[-1]

    with mock.patch.object(main_module, "build_optimizer", keep):
        yield built


def bytes_here(value: Any) -> int:
    return local_part(value).nbytes if isinstance(value, torch.Tensor) else 0


def run_alone(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run `cases` on one rank, which is this process, because it has already imported torch."""
    env = RankEnv()
    with warnings.catch_warnings(), process_group(env):
        warnings.simplefilter("ignore")
        return [run_case(case, env) for case in cases]
