"""Checkpoints of another model, optimizer or data stream are refused, with the differences."""

import pytest
import torch

from orchestrator.errors import TrainingError
from trainer.checkpoint.resume import check_model, check_stream, check_tensors
from trainer.checkpoint.state import Origin, Progress, Stream

FOLDER = "/runs/a/checkpoints/step-5"
STREAM = Stream(seed=1, global_batch_size=8, sequence_length=32, data="abc")
WEIGHTS = {"model.q.weight": torch.Size([4, 4]), "model.norm.weight": torch.Size([4])}
MOMENTS = {f"optimizer.{n.removeprefix('model.')}.exp_avg": s for n, s in WEIGHTS.items()}
ALL = WEIGHTS | MOMENTS | {"rng.0": torch.Size([5056])}
ADAPTER = {"model.q.lora_A.weight": torch.Size([2, 4])}


def refusal(here: dict[str, torch.Size], there: dict[str, torch.Size]) -> str:
    with pytest.raises(TrainingError) as caught:
        check_tensors(FOLDER, here, there)
    return caught.value.message


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
    message = refusal(ADAPTER, ALL)
    assert "belongs to a run that trained all weights, not only adapters" in message
    assert "belongs to a run that trained only adapters" in refusal(WEIGHTS, ADAPTER)


def test_differences_without_a_shape_are_found_in_the_configuration() -> None:
    there = Origin(config={"model_type": "llama", "num_hidden_layers": 4, "use_cache": True})
    here = Origin(config={"model_type": "llama", "num_hidden_layers": 3, "use_cache": False})
    with pytest.raises(TrainingError, match="num_hidden_layers was 4 and is now 3"):
        check_model(FOLDER, there, here)
    check_model(FOLDER, here, here)


def test_another_stream_of_samples_is_refused_with_each_key() -> None:
    other = Stream(seed=2, global_batch_size=8, sequence_length=32, data="abc")
    with pytest.raises(TrainingError, match=r"a different seed \(was 1\)\n"):
        check_stream(FOLDER, STREAM, other)
    masked = Stream(seed=1, global_batch_size=8, sequence_length=32, data="abc", document_mask=True)
    with pytest.raises(TrainingError, match=r"a different document_mask \(was False\)\n"):
        check_stream(FOLDER, STREAM, masked)


def test_progress_is_stored_and_read() -> None:
    progress = Progress(step=5, stream=STREAM, origin=Origin(config={"a": 1}, tokenizer="t"))
    assert Progress.from_json(progress.to_json()) == progress
