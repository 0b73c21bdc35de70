"""What only a GPU can show. `python -m pytest -m gpu` runs these tests and the others of this mark.

The same steps run on a CPU first where they can, so that a failure is the GPU's.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.diagnosis.dumps.dump import condense, parse
from tests.diagnosis.recorder import Pg, Recorder
from tests.trainer.launch.tiny_runs import finish, losses_of, run_program, tiny, train
from tests.trainer.test_loss import inputs, loss_with, reference

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}

NCCL_DUMP = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
from trainer.rank.evidence.flight import write_dump
device = torch.device("cuda", 0)
dist.init_process_group("nccl", device_id=device)
ones = torch.ones(4, device=device)
for _ in range(3):
    dist.all_reduce(ones)
dist.all_gather_into_tensor(torch.empty(4, device=device), ones)
torch.cuda.synchronize()
write_dump(Path(sys.argv[1]))
dist.destroy_process_group()
"""

FORK_BESIDE_NVML = """
import multiprocessing, torch
from orchestrator.agent.processes.exec_in_fork import open_driver

def use(answers):
    answers.put(float(torch.ones(3, device="cuda").sum()))

assert torch.cuda.device_count() >= 1
assert not open_driver(), "counting GPUs has initialised the driver"
forks = multiprocessing.get_context("fork")
answers = forks.SimpleQueue()
child = forks.Process(target=use, args=(answers,))
child.start()
child.join(60)
print(child.exitcode, answers.get() if child.exitcode == 0 else None)
"""


def trained(config: dict[str, Any], **env: str) -> dict[int, float]:
    ranks = train(config, 1, **env)
    assert finish(ranks) == [0], ranks[0].output
    return losses_of(Path(config["out"]))


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # In float32 only the order of sums differs; bfloat16 has 8 significant bits.
    [("float32", 1e-4), ("bfloat16", 2e-2)],
)
def test_losses_are_those_of_a_cpu(
    model: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"model": model, "dtype": dtype, "z_loss": 1e-3}
    expected = trained(tiny(tmp_path / "cpu", **dict(changes)), **ON_CPU)
    found = trained(tiny(tmp_path / "gpu", **dict(changes)))
    assert found == pytest.approx(expected, rel=tolerance)
    assert found != expected, "both ran on the same device"


@pytest.mark.gpu
def test_a_resumed_run_has_the_losses_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"deterministic": True, "checkpoint": {"every_steps": 2}}
    whole = trained(tiny(tmp_path / "whole", **dict(changes)))
    parts = tiny(tmp_path / "parts", **dict(changes))
    assert finish(train(parts, 1, NDCTL_DRILLS="kill:rank=0@step=4")) == [-signal.SIGKILL]
    assert [*losses_of(tmp_path / "parts")] == [1, 2, 3]
    assert trained(parts) == whole


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_chunked_loss_is_that_of_whole_logits(chunks: int, recompute: bool) -> None:
    hidden, weight, labels = (t.detach().cuda() for t in inputs())
    hidden.requires_grad_()
    weight.requires_grad_()
    expected = reference(hidden, weight, labels, 0.25)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    loss = loss_with(recompute, loss_chunks=chunks, z_loss=0.25, device=torch.device("cuda"))
    found = loss(hidden, weight, labels)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(hidden.grad, wanted[0].float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight.grad, wanted[1].float(), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_nccls_flight_recorder_has_the_names_that_the_diagnosis_reads(tmp_path: Path) -> None:
    path = tmp_path / "flight-0"
    one = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    run_program(NCCL_DUMP, str(path), TORCH_FR_BUFFER_SIZE="2000", **one)
    dump = parse(path.read_bytes())
    imitated = Recorder(0)
    imitated.call(Pg("0", "default_pg", (0,)))
    assert {*imitated.dump()["entries"][0]} <= {*dump["entries"][0]}
    names = [entry["profiling_name"] for entry in dump["entries"]]
    assert names.count("nccl:all_reduce") == 3
    assert any("all_gather" in name for name in names)
    (group,) = condense(0, dump).seats.values()
    assert (group.entered, group.done) == (4, 4)


@pytest.mark.gpu
def test_a_fork_of_a_process_that_counted_gpus_can_use_one() -> None:
    """As ranks are forked from a process that has imported torch."""
    assert run_program(FORK_BESIDE_NVML, PYTORCH_NVML_BASED_CUDA_CHECK="1").split() == ["0", "3.0"]
