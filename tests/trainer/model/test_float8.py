"""Float8 matrix products: which layers use them, where they are refused, and the rounding error.

A CPU has no float8 arithmetic. It is emulated by rounding the factors to float8.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.contract.codec import decode
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.contract.mesh import AXES
from orchestrator.errors import TrainingError
from tests.trainer.launch.tiny_runs import LAYERS, LLAMA, losses_of, tiny, work
from tests.trainer.launch.training_worker import run_alone
from tests.trainer.model.test_build import build
from tests.trainer.parallel.parity_cells import LOSS, difference
from trainer.model.float8 import apply_float8, convert

EMULATED = "float8 is emulated"
GATHERS = {"activation_checkpointing": "gathers"}


def config_of(model: dict[str, Any], **parallel: Any) -> TrainingConfig:
    values = {
        "model": {"config": model},
        "data": {"files": "text/*.txt", "sequence_length": 32},
        "train": {"steps": 1, "global_batch_size": 12, "float8": True},
        "parallel": {**dict.fromkeys(AXES, 1), **parallel},
        "micro_batch_size": 1,
        "out": "out",
    }
    config: TrainingConfig = decode(TrainingConfig, values)
    return config


def test_only_linear_layers_inside_the_decoder_layers_are_changed() -> None:
    float8 = import_module("torchao.float8.float8_linear")
    decoder = build(LLAMA)
    linear = {n for n, m in decoder.named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
    names = [name for name, _ in decoder.plain_parameters()]
    convert(decoder, config_of(LLAMA), emulate=True)
    changed = {n for n, m in decoder.named_modules() if isinstance(m, float8.Float8Linear)}
    assert changed == linear
    assert len(changed) == 3 * 7
    assert [name for name, _ in decoder.plain_parameters()] == names


@pytest.mark.parametrize(
    ("parallel", "in_float8"),
    [
        ({"dp_shard": 2}, True),
        ({"dp_replicate": 2}, False),
        ({"dp_shard": 4, "fsdp": {"reshard_after_forward": 2}}, False),
        ({"dp_shard": 3}, False),
    ],
)
def test_weights_are_gathered_in_float8_where_fsdp_can(
    parallel: dict[str, Any], in_float8: bool
) -> None:
    decoder = build(LLAMA)
    convert(decoder, config_of(LLAMA, **parallel), emulate=True)
    weight = decoder.get_parameter("model.layers.0.self_attn.q_proj.weight")
    gathered = import_module("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
    assert isinstance(weight, gathered) is in_float8


def test_a_device_before_hopper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingError, match="Hopper or newer, and this device is cpu"):
        apply_float8(build(LLAMA), torch.device("cpu"), config_of(LLAMA))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(TrainingError, match="this device is NVIDIA A100"):
        apply_float8(build(LLAMA), torch.device("cuda"), config_of(LLAMA))


def test_weights_whose_sizes_are_not_multiples_of_16_are_named() -> None:
    model = {**LLAMA, "intermediate_size": 72}
    with pytest.raises(TrainingError, match=r"0\.mlp\.gate_proj \(72, 32\); .*; and 3 more"):
        convert(build(model), config_of(model), emulate=True)
    with pytest.raises(TrainingError, match=r"multiples of 32 \(16 x tp\).*0\.self_attn\.k_proj"):
        convert(build(LLAMA), config_of(LLAMA, tp=2), emulate=True)


def changed(out: Path, **changes: Any) -> dict[str, Any]:
    """A tiny run of a model whose sides are multiples of 32."""
    model = {"config": {**LLAMA, "num_hidden_layers": LAYERS, "num_key_value_heads": 4}}
    return {**tiny(out, optimizer={"lr": 1e-3}, **changes), "model": model}


@pytest.mark.process
def test_float8_rounding_changes_the_loss_little_and_no_more_on_a_mesh(tmp_path: Path) -> None:
    """Each rank scales by its own activations and its own part of a weight, so a mesh rounds
    otherwise than one rank."""
    plain, one, shard2, tp2, gathers = (
        changed(tmp_path / name, **changes)
        for name, changes in (
            ("plain", {}),
            ("one", {"float8": True}),
            ("shard2", {"float8": True, "parallel": {"dp_shard": 2}}),
            ("tp2", {"float8": True, "parallel": {"tp": 2}}),
            ("gathers", {"float8": True, "parallel": {"tp": 2}, **GATHERS}),
        )
    )
    on_cpu = {**one, "train": {**one["train"], "compile": True}}
    refused, *_ = run_alone(
        [
            {"config": on_cpu, "refused": True},
            {"config": plain, "unsaved": True},
            {"config": one, "broken": EMULATED, "unsaved": True},
        ]
    )
    assert refused["code"] == exit_codes.REFUSED
    assert "this device is cpu" in refused["refused"]
    case = {"config": shard2, "broken": EMULATED}
    others = [{**case, "config": config, "unsaved": True} for config in (tp2, gathers)]
    work(tmp_path, 2, [{**case, "stop_after": 3}, case, *others])
    rounded = difference(tmp_path / "one", tmp_path / "plain")
    assert LOSS < rounded.loss < 0.02, rounded
    for mesh in ("shard2", "tp2"):
        assert LOSS < difference(tmp_path / mesh, tmp_path / "plain").loss < 0.02, mesh
    assert [*losses_of(tmp_path / "shard2")] == [1, 2, 3, 4, 5], "through a checkpoint"
    assert losses_of(tmp_path / "gathers") == losses_of(tmp_path / "tp2")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recompute", [{}, GATHERS], ids=["none", "gathers"])
def test_compiled_float8_layers_train_on_a_mesh_with_tensor_parallel(
    tmp_path: Path, recompute: dict[str, Any]
) -> None:
    """FSDP gathers the weights of each tp rank in float8."""
    parallel = {"dp_shard": 2, "tp": 2}
    run_alone([{"config": changed(tmp_path / "plain")}])
    config = changed(tmp_path / "mesh", float8=True, compile=True, parallel=parallel, **recompute)
    work(tmp_path, 4, [{"config": config, "broken": EMULATED}], timeout=1000)
    assert LOSS < difference(tmp_path / "mesh", tmp_path / "plain").loss < 0.02
