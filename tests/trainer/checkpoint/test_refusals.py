"""Checkpoints of another model, optimizer or data stream are refused, with the differences."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace

from orchestrator.contract.spec.model_spec import LoraSpec
from orchestrator.errors import TrainingError
from trainer.checkpoint.resume import KEYS, check_model, check_stream, check_tensors
from trainer.checkpoint.state import Origin, Progress, Stream

FOLDER = "/runs/a/checkpoints/step-5"
STREAM = Stream(seed=1, global_batch_size=8, sequence_length=32, data="abc")
WEIGHTS = {"model.q.weight": torch.Size([4, 4]), "model.norm.weight": torch.Size([4])}
MOMENTS = {f"optimizer.{n.removeprefix('model.')}.exp_avg": s for n, s in WEIGHTS.items()}
ALL = WEIGHTS | MOMENTS | {"rng.0": torch.Size([5056])}


def refusal(here: dict[str, torch.Size], there: dict[str, torch.Size]) -> str:
    with pytest.raises(TrainingError) as caught:
        check_tensors(FOLDER, here, there)
    return caught.value.message


def changes(**fields: Any) -> str:
    with pytest.raises(TrainingError) as caught:
        check_stream(FOLDER, STREAM, replace(STREAM, **fields))
    before, _, told = caught.value.message.partition(": ")
    assert before == f"{FOLDER} belongs to a run with other data or settings"
    return told


def test_a_checkpoint_of_the_same_tensors_is_accepted() -> None:
    check_tensors(FOLDER, WEIGHTS | MOMENTS, ALL)


def test_a_stage_compares_only_its_own_tensors() -> None:
    one = {name: size for name, size in (WEIGHTS | MOMENTS).items() if ".q." in name}
    check_tensors(FOLDER, one, ALL)


def test_another_model_is_refused_with_missing_tensors_and_other_shapes() -> None:
    here = {**WEIGHTS, "model.q.weight": torch.Size([8, 4]), "model.k.weight": torch.Size([1])}
    assert refusal(here, WEIGHTS) == (
        f"{FOLDER} belongs to another model:"
        " model.q.weight is of shape (4, 4) in the checkpoint and of shape (8, 4) in the job;"
        " model.k.weight is missing in the checkpoint and of shape (1,) in the job"
    )


def test_another_optimizer_is_refused_with_more_or_fewer_moments() -> None:
    message = refusal(WEIGHTS | MOMENTS, WEIGHTS)
    assert (
        "belongs to another optimizer: optimizer.q.weight.exp_avg is missing in the checkpoint"
        in message
    )
    message = refusal(WEIGHTS, ALL)
    assert (
        "belongs to another optimizer: optimizer.q.weight.exp_avg is of shape (4, 4) in" in message
    )


def test_adapters_and_whole_models_are_distinguished() -> None:
    whole, adapters = Origin(), Origin(lora=LoraSpec())
    with pytest.raises(TrainingError, match="a run that trained all weights, not only adapters"):
        check_model(FOLDER, whole, adapters)
    with pytest.raises(TrainingError, match="belongs to a run that trained only adapters"):
        check_model(FOLDER, adapters, whole)


def test_differences_without_a_shape_are_found_in_the_configuration() -> None:
    there = Origin(config={"model_type": "llama", "num_hidden_layers": 4, "use_cache": True})
    here = Origin(config={"model_type": "llama", "num_hidden_layers": 3, "use_cache": False})
    with pytest.raises(TrainingError, match="num_hidden_layers was 4 and is now 3"):
        check_model(FOLDER, there, here)
    check_model(FOLDER, here, here)


def test_another_stream_of_samples_is_refused_with_each_key() -> None:
    assert changes(seed=2) == "train.seed was 1 and is now 2"
    masked = changes(document_mask=True, global_batch_size=4)
    assert masked == (
        "train.global_batch_size was 8 and is now 4; data.document_mask was False and is now True"
    )
    assert "the training files, their tokenizer, or how much data.validation" in changes(data="d")
    longer = changes(data="d", sequence_length=64)
    assert longer == "data.sequence_length was 32 and is now 64", "with the same files"


def test_every_field_of_a_stream_is_compared() -> None:
    assert {*KEYS, "data"} == {*Stream.__struct_fields__}


def test_progress_is_stored_and_read() -> None:
    progress = Progress(step=5, stream=STREAM, origin=Origin(config={"a": 1}, tokenizer="t"))
    assert Progress.from_json(progress.to_json()) == progress
