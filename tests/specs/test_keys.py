"""`ndctl explain`: each key of a spec has a text, and a wrong path leads to the right one."""

import pytest

from orchestrator.contract.codec import ABSENT
from orchestrator.errors import SpecError
from orchestrator.specs.explain import describe_key, describe_tree
from orchestrator.specs.keys import ROOT, Key, all_keys, key_at
from tests.repository import key_docs

KEYS = [*all_keys()]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_every_key_says_what_it_means(key: Key) -> None:
    assert len(key.about.split()) >= 2, "write a docstring below the field"
    assert "None:" not in key.about, "a reader of YAML knows null, not None"


def test_every_time_says_its_unit() -> None:
    known = {"cluster.slurm.notice_s": "in its name"}
    for key in KEYS:
        if key.kind.startswith("number, above 0") and "timeout" in key.name:
            assert "econds" in key.about or key.path in known, key.path


def test_a_key_is_explained_with_type_limits_default_and_the_keys_inside() -> None:
    text = describe_key(key_at("train.optimizer.lr"), 80)
    assert "number, above 0" in text
    assert "0.0003" in text
    assert "Peak learning rate." in text
    group = describe_key(key_at("train.optimizer"), 80)
    assert "weight_decay: number, at least 0 (default 0.1)" in group
    assert max(map(len, group.splitlines())) <= 80
    assert "DEFAULT" not in group


def test_the_top_names_both_kinds_of_spec() -> None:
    names = {key.path for key in all_keys() if "." not in key.path}
    assert {"name", "model", "run", "cluster", "notify[]"} <= names


def test_the_tree_has_every_key_once() -> None:
    lines = describe_tree(ROOT).splitlines()
    assert len(lines) == len(KEYS) > 250


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("train.optimiser", "train.optimizer"),
        ("optimizer.lr", "train.optimizer.lr"),
        ("lr", "train.optimizer.lr"),
        ("cluster.slrum.partition", "cluster.slurm"),
        ("max_restarts", "resilience.max_restarts"),
        ("train.global_batchsize", "train.global_batch_size"),
    ],
)
def test_a_wrong_path_leads_to_the_right_one(path: str, right: str) -> None:
    with pytest.raises(SpecError) as refused:
        key_at(path)
    assert refused.value.fix == f"did you mean {right}?"


@pytest.mark.parametrize("path", ["resilience.policy.name", "resilience.policy[3].name"])
def test_items_of_a_list_have_keys(path: str) -> None:
    assert key_at(path).path == "resilience.policy[].name"


def test_a_key_below_a_single_value_is_refused_with_the_values_it_takes() -> None:
    with pytest.raises(SpecError, match="no keys inside; it takes whole number"):
        key_at("cluster.hosts.number")


def test_only_what_must_be_given_has_no_default() -> None:
    assert key_at("train.steps").default is ABSENT
    assert key_at("train.grad_clip").default == 1.0
    assert key_at("train.wandb").default is None


def test_the_page_of_all_keys_is_that_of_the_program() -> None:
    """`python -m tests.repository.key_docs` writes it."""
    assert key_docs.PAGE.read_text() == key_docs.page()


def test_a_key_of_another_tool_leads_to_the_key_here() -> None:
    with pytest.raises(SpecError, match="no key learning_rate") as refused:
        key_at("learning_rate")
    assert refused.value.fix == "did you mean train.optimizer.lr?"
