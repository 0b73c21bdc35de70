"""`train.deterministic`: what it sets, and that losses repeat bit by bit."""

import os
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.trainer.launch.forked_ranks import FORKING
from tests.trainer.launch.tiny_runs import finish, losses_of, run_program, tiny, train
from trainer.rank.determinism import make_deterministic


def write_settings(file: Path) -> None:
    """In a process of its own, whose settings it changes."""
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    os.environ["NCCL_ALGO"] = "Tree"
    make_deterministic()
    inductor = import_module("torch._inductor.config")
    found = (
        torch.are_deterministic_algorithms_enabled(),
        not torch.is_deterministic_algorithms_warn_only_enabled(),
        import_module("torch.utils.deterministic").fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        not torch.backends.cudnn.benchmark,
        not torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        inductor.deterministic,
        os.environ["CUBLAS_WORKSPACE_CONFIG"],
        os.environ["NCCL_ALGO"],
    )
    file.write_text(" ".join(map(str, found)))


ATTENTION = """
import torch
from torch.nn.functional import embedding, scaled_dot_product_attention
from trainer.rank.determinism import make_deterministic
make_deterministic()

def once():
    torch.manual_seed(0)
    table = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tokens = torch.randint(0, 512, (4, 2048), device="cuda")
    x = embedding(tokens, table).view(4, 2048, 16, 64).transpose(1, 2)
    out = scaled_dot_product_attention(x, x, x, is_causal=True)
    logits = out.transpose(1, 2).reshape(-1, 1024) @ table.t()
    torch.nn.functional.cross_entropy(logits.float(), tokens.flatten()).backward()
    return table.grad.clone()

first = once()
assert first.isfinite().all()
assert all(torch.equal(first, once()) for _ in range(20))
try:
    torch.histc(torch.rand(100, device="cuda"))
except RuntimeError as exc:
    print(exc)
"""


@pytest.mark.process
def test_all_settings_are_made_and_variables_of_the_user_stay(tmp_path: Path) -> None:
    process = FORKING.Process(target=write_settings, args=(tmp_path / "settings",))
    process.start()
    process.join()
    found = (tmp_path / "settings").read_text().split()
    assert found == [*["True"] * 8, ":4096:8", "Tree"]


@pytest.mark.process
def test_on_a_cpu_the_losses_are_those_of_any_other_run(tmp_path: Path) -> None:
    for name, asked in (("set", True), ("unset", False)):
        assert finish(train(tiny(tmp_path / name, deterministic=asked), 1)) == [0]
    assert losses_of(tmp_path / "set") == losses_of(tmp_path / "unset")
    assert [*losses_of(tmp_path / "set")] == [1, 2, 3, 4, 5]


@pytest.mark.gpu
def test_gradients_of_attention_and_embedding_repeat_and_others_fail() -> None:
    assert torch.cuda.is_available()
    assert "does not have a deterministic implementation" in run_program(ATTENTION)
