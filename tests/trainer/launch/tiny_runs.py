"""Tiny training runs for tests: their configuration, how ranks start, and their metrics."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from orchestrator.agent.rank_socket import free_port
from tests.trainer.launch.forked_ranks import run_forked, start_forked

ROOT = Path(__file__).parents[3]
LIMIT_S = 500.0
"""Timeout of ranks that take seconds on an idle machine. A whole test may take 600 s."""
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
QWEN3: dict[str, Any] = {**LLAMA, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}
MODELS = {"llama": LLAMA, "qwen3": QWEN3}
LAYERS = 2
"""Layers of a model that ranks train: few, because they take half of the time of a step."""

LIGHT: dict[str, Any] = {"layers": 1, "optimizer": {"name": "sgd", "lr": 1e-2}}
"""For runs that save often: they have few tensors. The time of a save depends on their number."""

DISK: dict[str, Any] = {"memory": {"every": "off"}}
"""Keys of `checkpoint` for tests of the disk."""


def write_text(folder: Path) -> str:
    """Write three text files into `folder`; the glob that finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(3):
        words = " ".join(f"word{(i * i + part) % 97}" for i in range(800))
        (folder / f"{part}.txt").write_text(words)
    return str(folder / "*.txt")


def tiny(out: Path, **changes: Any) -> dict[str, Any]:
    """A configuration of the trainer with steps of a few milliseconds.

    `changes` are keys of `train`, except `model`, `layers`, `parallel`, `micro` and `checkpoint`.
    """
    model = {
        **MODELS[changes.pop("model", "llama")],
        "num_hidden_layers": changes.pop("layers", LAYERS),
    }
    return {
        "model": {"config": model},
        "data": {"files": write_text(out.parent / "text"), "sequence_length": 32},
        "parallel": changes.pop("parallel", {}),
        "micro_batch_size": changes.pop("micro", 2),
        "checkpoint": {"every_steps": 100, **DISK, **changes.pop("checkpoint", {})},
        "train": {
            "steps": 5,
            "global_batch_size": 4,
            "optimizer": {"lr": 1e-2},
            "schedule": {"kind": "cosine", "warmup_steps": 1},
            **changes,
        },
        "out": str(out),
    }


def run_program(program: str, *arguments: str, **env: str) -> str:
    """What a program of Python prints that can import the trainer, in an environment without
    settings of the user."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses_of(out: Path) -> dict[int, float]:
    """Step -> loss. A repeated step has its last loss."""
    return {line["step"]: line["loss"] for line in metrics_of(out)}


def environments(num_ranks: int, env: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """The environment variables of each rank, as torchrun sets them."""
    port = free_port("127.0.0.1")
    return [
        {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            **(env or {}),
        }
        for rank in range(num_ranks)
    ]


@dataclass
class RankProcess:
    process: BaseProcess
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, timeout: float) -> int:
        """Exit code; the negative signal number when a signal killed the rank."""
        self.process.join(timeout)
        code = self.process.exitcode
        assert code is not None, f"the rank still runs after {timeout:.0f} s: {self.output}"
        return code

    def kill(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def start_ranks(
    module: str, config: Path, num_ranks: int, env: Mapping[str, str] | None = None
) -> list[RankProcess]:
    """Start `python -m module config` as `num_ranks` ranks, each with its log beside `config`."""
    ranks = []
    for rank, environment in enumerate(environments(num_ranks, env)):
        log = config.with_suffix(f".rank-{rank}.log")
        log.unlink(missing_ok=True)
        ranks.append(RankProcess(start_forked(module, [str(config)], environment, log), log))
    return ranks


def start_torchrun(
    program: Path, config: Path, *options: str, env: Mapping[str, str] | None = None
) -> RankProcess:
    """Start torchrun with 2 ranks that run the Python file `program` with `config`. Like those of
    an agent, they are forked, so neither torchrun nor the ranks import anything again."""
    log = config.with_suffix(".torchrun.log")
    log.unlink(missing_ok=True)
    words = ["--nproc-per-node=2", "--start-method=fork", "--master-addr=127.0.0.1"]
    words += [f"--master-port={free_port('127.0.0.1')}", *options]
    words += ["--run-path", str(program), str(config)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= env or {}
    process = start_forked("torch.distributed.run", words, environment, log, has_children=True)
    return RankProcess(process, log)


def finish(ranks: Sequence[RankProcess], timeout: float = LIMIT_S) -> list[int]:
    """The exit codes. A rank that has not ended after `timeout` is killed and fails the test."""
    try:
        return [rank.wait(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def train(config: dict[str, Any], num_ranks: int, **env: str) -> list[RankProcess]:
    """Start the trainer on `config` as `num_ranks` ranks."""
    path = Path(config["out"]).with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return start_ranks("trainer", path, num_ranks, env)


def work(
    folder: Path,
    num_ranks: int,
    cases: Sequence[dict[str, Any]],
    timeout: float = LIMIT_S,
    worker: str = "tests.trainer.launch.training_worker",
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `cases` in order on the same ranks. The `worker` module describes its cases."""
    return run_forked(worker, folder, cases, environments(num_ranks, env), timeout)
