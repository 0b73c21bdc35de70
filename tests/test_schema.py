"""The schema says of a spec what the loader says."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.contract.codec import Invalid, decode, encode
from orchestrator.contract.model import ModelSpec
from orchestrator.contract.spec import JobSpec
from orchestrator.load import dump_spec, read_spec
from orchestrator.schema import json_schema

EXAMPLES = Path(__file__).parent.parent / "examples"
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


def test_the_schema_is_a_schema_of_its_dialect_and_plain_json() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize("name", ["quickstart", "qwen3-hsdp"])
def test_the_examples_and_their_dumps_are_valid(name: str) -> None:
    path = EXAMPLES / f"{name}.yaml"
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
        ("data", None),
        ("data.files", ""),
        ("data.tokenizer", "words"),
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
        ("parallel.tp", 0),
        ("parallel.pp", "auto"),
        ("cluster.backend", "moon"),
        ("checkpoint.async", 1),
        ("resilience.hang_timeout", -1),
        ("resilience", []),
        ("run_root", ""),
    ],
)
def test_loader_and_schema_refuse_the_same(path: str, value: Any) -> None:
    data = with_value(path, value)
    assert not loads(data)
    assert not VALIDATOR.is_valid(data)


@pytest.mark.parametrize("key", ["name", "model", "data", "train"])
def test_loader_and_schema_both_miss_a_required_key(key: str) -> None:
    data = {other: value for other, value in GOOD.items() if other != key}
    assert not loads(data)
    assert not VALIDATOR.is_valid(data)


PATHS = [
    f"{section}.{key}"
    for section, body in encode(decode(JobSpec, GOOD)).items()
    if isinstance(body, dict)
    for key in body
]
VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [0, 1, 2, 8, 0.5, -1, True, None, "auto", "none", "x", "", [], {}, 1 << 21]
)


@settings(deadline=None)
@given(st.sampled_from(PATHS), VALUES)
def test_what_the_loader_accepts_is_valid(path: str, value: Any) -> None:
    data = with_value(path, value)
    if loads(data):
        VALIDATOR.validate(data)


def test_every_key_with_a_docstring_has_it_as_description() -> None:
    train = SCHEMA["$defs"]["TrainSpec"]["properties"]
    assert train["steps"]["description"] == "Optimizer steps of the whole job."
    assert SCHEMA["$defs"]["CheckpointSpec"]["properties"]["async"]["default"] is True
    assert SCHEMA["$defs"]["ModelSpec"]["description"] == ModelSpec.__doc__
    assert SCHEMA["properties"]["run_root"]["default"] == "ndctl-runs"


def test_no_object_of_the_schema_takes_unknown_keys() -> None:
    for name, definition in SCHEMA["$defs"].items():
        assert definition["additionalProperties"] is False, name
    assert SCHEMA["additionalProperties"] is False
