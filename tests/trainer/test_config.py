"""Reading a configuration of the trainer, and refusing what it cannot train."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.contract.codec import Invalid, decode
from orchestrator.contract.files.trainer_config import TrainingConfig
from orchestrator.errors import TrainingError
from tests.trainer.launch.tiny_runs import tiny
from trainer.config import complete, load_config, parse_yaml, with_dtype


def test_yaml_reads_numbers_in_every_notation() -> None:
    assert parse_yaml("[3e-4, 1E3, -2.5e+1, .5e1, 3.0e-4]") == [3e-4, 1e3, -25.0, 5.0, 3e-4]
    assert parse_yaml("[e4, 1e, 3e-4x]") == ["e4", "1e", "3e-4x"]


def test_json_and_yaml_configurations_are_read_equally(tmp_path: Path) -> None:
    config = tiny(tmp_path / "out")
    (tmp_path / "a.json").write_text(yaml.safe_dump(config, default_flow_style=True, width=10**6))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(TrainingError, match="failed to read the configuration"):
        load_config(tmp_path / "a.json")
    assert load_config(tmp_path / "a.yaml") == decode(TrainingConfig, config)


def test_examples_trainer_yaml_is_a_valid_configuration() -> None:
    path = Path(__file__).parents[2] / "examples" / "trainer.yaml"
    complete(load_config(path), world_size=4)


def test_all_mistakes_of_a_configuration_are_reported_at_once(tmp_path: Path) -> None:
    config = tiny(tmp_path / "out", steps=0, dtype="float8")
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump({**config, "extra": 1}))
    with pytest.raises(TrainingError) as caught:
        load_config(tmp_path / "bad.yaml")
    assert all(word in str(caught.value) for word in ("extra", "train.steps", "train.dtype"))


def pipeline(schedule: str, **changes: Any) -> dict[str, Any]:
    return {"parallel": {"pp": 2, "pipeline": {"schedule": schedule}}, **changes}


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        (pipeline("1f1b", micro=4), 2, "be at least 2, one for each stage; it is 1"),
        (pipeline("interleaved_1f1b", global_batch_size=10), 2, "equal parts in its 2 rounds"),
        (pipeline("zbv", activation_checkpointing="selective"), 2, "selective recomputation sup"),
        (pipeline("zbv", activation_checkpointing="elementwise"), 2, "zbv runs two"),
        (pipeline("zbv", compile=True), 2, "cannot split the backward pass of a compiled layer"),
        ({"parallel": {"tp": 2, "dp_shard": 1}}, 4, "for 2 ranks, but torchrun started 4"),
        ({"float8": True, "parallel": {"tp": 2}}, 2, "which is slower than bfloat16"),
        ({"profile": {"at_step": 1, "ranks": [0, 2]}}, 2, "the job has ranks 0 to 1"),
        ({"optimizer": {"name": "adafactor"}}, 2, "fails on sharded parameters"),
        ({"optimizer": {"name": "adafactor"}, "dtype": "bfloat16"}, 1, "sharded parameters"),
        ({"float8": True}, 1, "which is slower than bfloat16"),
        (
            {"run_ahead": 2, "parallel": {"fsdp": {"cpu_offload": True}}},
            2,
            "the host computes the update",
        ),
    ],
)
def test_unsupported_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], world_size: int, message: str
) -> None:
    config: TrainingConfig = decode(TrainingConfig, tiny(tmp_path / "out", **changes))
    with pytest.raises(TrainingError, match=message):
        complete(config, world_size)


def test_auto_is_bfloat16_where_the_device_is_fast_at_it(tmp_path: Path) -> None:
    config = complete(decode(TrainingConfig, tiny(tmp_path / "out")), 1)
    assert config.train.dtype == "auto"
    for fast, dtype in ((True, "bfloat16"), (False, "float32")):
        assert with_dtype(config, fast_bfloat16=fast).train.compute_dtype == dtype
    for asked in ("float32", "bfloat16"):
        config = complete(decode(TrainingConfig, tiny(tmp_path / "out", dtype=asked)), 1)
        assert with_dtype(config, fast_bfloat16=asked == "float32").train.dtype == asked


def test_an_optimizer_that_needs_float32_is_refused_once_auto_is_decided(tmp_path: Path) -> None:
    values = tiny(tmp_path / "out", optimizer={"name": "adafactor"})
    config = complete(decode(TrainingConfig, values), 1)
    assert with_dtype(config, fast_bfloat16=False).train.dtype == "float32"
    with pytest.raises(TrainingError, match="sharded parameters"):
        with_dtype(config, fast_bfloat16=True)


def test_only_fused_optimizers_can_run_ahead(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"run_ahead": 1, "optimizer": {"name": "sgd"}}
    with pytest.raises(Invalid, match="only the fused kernels of adamw and adam can skip"):
        decode(TrainingConfig, tiny(tmp_path / "out", **asked))
