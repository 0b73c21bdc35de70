"""The JSON schema and the loader accept the same specs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.spec.job_spec import JobSpec
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.load import dump_spec, read_spec
from orchestrator.schema import json_schema

EXAMPLES = Path(__file__).parent.parent / "examples"
SPECS = sorted(path for path in EXAMPLES.glob("*.yaml") if path.stem != "trainer")
"""Only the trainer reads trainer.yaml."""
SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
GOOD: dict[str, Any] = {
    "name": "demo",
    "model": {"preset": "llama-tiny"},
    "data": {"files": "*.txt", "sequence_length": 64},
    "train": {"steps": 10, "global_batch_size": 8},
}


def with_value(path: str, value: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(GOOD))
    *above, last = path.split(".")
    section = data
    for key in above:
        section = section.setdefault(key, {})
    section[last] = value
    return data


def loads(data: Any) -> bool:
    try:
        decode(JobSpec, data)
    except Invalid:
        return False
    return True


def test_the_schema_is_valid_in_its_dialect_and_plain_json() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.name)
def test_the_examples_and_their_dumps_are_valid(path: Path) -> None:
    spec = read_spec(path)
    VALIDATOR.validate(encode(spec))
    VALIDATOR.validate(yaml.safe_load(dump_spec(spec)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("nam", "x"),
        ("name", "My Job"),
        ("name", 3),
        ("model", {}),
        ("model", {"preset": "llama-tiny", "path": "x"}),
        ("model", {"preset": None}),
        ("model.preset", "gpt"),
        ("model.lora", {"rank": 0}),
        ("model.lora", {"target_modules": "q_proj"}),
        ("model.lora", {"target_modules": [1]}),
        ("model.lora.quantize", "int8"),
        ("data", None),
        ("data.files", ""),
        ("data.tokenizer", ""),
        ("data.tokenizer", 3),
        ("data.format", "csv"),
        ("data.validation", {}),
        ("data.validation", {"files": "a", "fraction": 0.1}),
        ("data.validation", {"fraction": 0.9}),
        ("data.sequence_length", 4),
        ("data.sequence_length", 2**21),
        ("train.steps", 0),
        ("train.steps", "60"),
        ("train.steps", 1.5),
        ("train.steps", True),
        ("train.stepz", 5),
        ("train.dtype", "fp32"),
        ("train.micro_batch_size", 0),
        ("train.micro_batch_size", "most"),
        ("train.optimizer.lr", 0),
        ("train.optimizer.beta1", 1),
        ("train.schedule.kind", "step"),
        ("train.activation_checkpointing", "some"),
        ("train.compile", "yes"),
        ("train.grad_clip", 0),
        ("train.profile", {"steps": 2}),
        ("train.profile", {"at_step": 3, "ranks": [-1]}),
        ("parallel.tp", 0),
        ("parallel.data", "zero2"),
        ("parallel.context", "star"),
        ("objective", "speed"),
        ("train.base_batch_size", 0),
        ("parallel.pipeline.schedule", "dualpipe"),
        ("parallel.pipeline.stages_per_rank", 0),
        ("parallel.fsdp.reshard_after_forward", 1),
        ("parallel.fsdp.reshard_after_forward", "yes"),
        ("parallel.fsdp.reshard_after_forward", 2.5),
        ("parallel.fsdp.wrap", "two words"),
        ("parallel.fsdp.backward_prefetch", -1),
        ("cluster.backend", "moon"),
        ("checkpoint.async", 1),
        ("resilience.hang_timeout", -1),
        ("resilience", []),
        ("run_root", ""),
    ],
)
def test_loader_and_schema_refuse_the_same_specs(path: str, value: Any) -> None:
    data = with_value(path, value)
    assert not loads(data)
    assert not VALIDATOR.is_valid(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model", {"preset": "llama-tiny", "weights": "w", "lora": {}}),
        ("model.lora", {"rank": 4, "target_modules": ["q_proj"], "quantize": "nf4"}),
        ("data.tokenizer", "models/llama"),
        ("data.validation", {"fraction": 0.1}),
        ("data.validation", {"files": "held-out/*.txt"}),
        ("train.profile", {"at_step": 3, "steps": 1, "ranks": [0, 3]}),
        ("train.output_dtype", "float32"),
        ("parallel", {"pp": "auto", "dp_replicate": "auto", "cp": "auto", "tp": "auto"}),
        ("parallel.pipeline.schedule", "auto"),
        ("parallel.fsdp.reshard_after_forward", "auto"),
        ("objective", "fewest_hosts"),
        ("train.base_batch_size", 16),
        ("parallel.fsdp.reshard_after_forward", False),
        ("parallel.fsdp.reshard_after_forward", 2),
        ("parallel.pipeline", {"schedule": "zbv"}),
        ("parallel.pipeline", {"schedule": "interleaved_1f1b", "stages_per_rank": 4}),
        ("parallel", {"data": "zero1", "dp_replicate": 4}),
    ],
)
def test_loader_and_schema_accept_the_same_specs(path: str, value: Any) -> None:
    data = with_value(path, value)
    assert loads(data)
    VALIDATOR.validate(data)
    VALIDATOR.validate(encode(decode(JobSpec, data)))


@pytest.mark.parametrize("key", ["name", "model", "data", "train"])
def test_loader_and_schema_both_miss_a_required_key(key: str) -> None:
    data = {other: value for other, value in GOOD.items() if other != key}
    assert not loads(data)
    assert not VALIDATOR.is_valid(data)


def paths_in(body: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in body.items():
        if above:
            yield f"{above}{key}"
        if isinstance(value, dict):
            yield from paths_in(value, f"{above}{key}.")


PATHS = list(paths_in(encode(decode(JobSpec, GOOD))))
VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [0, 1, 2, 8, 0.5, -1, True, None, "auto", "none", "x", "", [], {}, 1 << 21]
)


@settings(deadline=None)
@given(st.sampled_from(PATHS), VALUES)
def test_specs_that_the_loader_accepts_are_valid(path: str, value: Any) -> None:
    data = with_value(path, value)
    if loads(data):
        VALIDATOR.validate(data)


def test_every_key_with_a_docstring_has_it_as_description() -> None:
    train = SCHEMA["$defs"]["TrainSpec"]["properties"]
    assert train["steps"]["description"] == "Optimizer steps of the whole job."
    assert SCHEMA["$defs"]["CheckpointSpec"]["properties"]["async"]["default"] is True
    assert SCHEMA["$defs"]["ModelSpec"]["description"] == ModelSpec.__doc__
    assert SCHEMA["properties"]["run_root"]["default"] == "ndctl-runs"


def test_no_object_of_the_schema_accepts_unknown_keys() -> None:
    for name, definition in SCHEMA["$defs"].items():
        assert definition["additionalProperties"] is False, name
    assert SCHEMA["additionalProperties"] is False


def test_a_switch_may_be_a_boolean() -> None:
    memory = json_schema()["$defs"]["MemoryCheckpointSpec"]["properties"]["every"]
    assert memory["anyOf"][1]["enum"] == ["auto", "on", "off", True, False]
