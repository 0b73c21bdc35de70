"""`ndctl policy`: what failures of a class meet, and what docs/recover.md says of it."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from orchestrator.app.policies import explain, explained_text, listed_text, policy_of
from orchestrator.cli import cli
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.contract.spec.policy import PolicyRule
from orchestrator.errors import SpecError
from orchestrator.job.policy import default_rules

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "recover.md").read_text()
OWN: dict[str, Any] = yaml.safe_load(
    DOCUMENT.split("```yaml\n")[1].split("```")[0]  # the example of the document
)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    body = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    body["resilience"] |= OWN["resilience"]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(body))
    return str(path)


def names(name: str, spec: str | None = None) -> list[str]:
    return [rule.name for rule in explain(name, policy_of(spec)).rules]


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("disk-full", ["the-class-stops"]),
        ("infiniband-error", ["twice-on-one-host", "second-strike", "heals-by-itself"]),
        ("scheduler-sigterm", ["asked-to-leave"]),
        ("gpu-lost", ["as-the-class-says"]),
        (
            "python-exception",
            ["same-error-twice", "crash-loop", "class-budget", "as-the-class-says"],
        ),
    ],
)
def test_a_class_meets_these_rules_in_this_order_up_to_one_that_always_fits(
    name: str, rules: list[str]
) -> None:
    assert names(name) == rules


def test_every_class_meets_a_rule_that_always_fits() -> None:
    found = policy_of(None)
    for rule in found.classes:
        final = explain(rule.name, found).rules[-1]
        assert (final.times, final.phases) == (1, ())


def test_rules_and_classes_of_a_spec_go_first(spec: str) -> None:
    assert names("licence-server", spec) == ["licences-come-back"]
    assert names("disk-full", spec) == ["saving-fails-thrice", "the-class-stops"]
    said = explained_text(explain("licence-server", policy_of(spec)))
    assert "known by lines like licence .* refused" in said
    assert (
        "1 licences-come-back  always: restart in place; from the second of its class on after"
        " about 60 s, doubled up to 900 s"
    ) in said
    assert "Budget: 5 restarts without a new checkpoint" in said
    assert "after 3 allocations in a row without a new checkpoint" in said


def test_a_class_that_there_is_not_has_a_neighbour() -> None:
    with pytest.raises(SpecError) as caught:
        explain("disk-ful", policy_of(None))
    assert str(caught.value.fix).startswith("did you mean disk-full?")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("xid-48", "xid-48-double-bit-ecc"),
        ("xid-79", "gpu-lost"),
        ("Xid 79", "gpu-lost"),
        ("xid-145", "xid-145-nvlink"),
        ("nccl-watchdog", "nccl-watchdog-timeout"),
    ],
)
def test_a_class_is_known_by_the_beginning_of_its_name_and_by_its_xid(said: str, name: str) -> None:
    assert explain(said, policy_of(None)).name == name


@pytest.mark.parametrize("said", ["nccl", "xid"])
def test_the_beginning_of_several_names_is_told_with_all_of_them(said: str) -> None:
    with pytest.raises(SpecError) as caught:
        explain(said, policy_of(None))
    fix = str(caught.value.fix)
    classes = {rule.name for rule in policy_of(None).classes if rule.name.startswith(f"{said}-")}
    assert all(name in fix for name in classes)


def test_the_list_has_every_rule_and_class_once() -> None:
    said = listed_text(policy_of(None)).splitlines()
    for rule in default_rules():
        assert sum(f" {rule.name}: " in line for line in said) == 1
    assert sum(line.split()[0] == "segfault" for line in said if line.strip()) == 1


def test_the_command_line_prints_both_as_text_and_json(spec: str) -> None:
    run = CliRunner().invoke
    assert run(cli, ["policy"]).output == run(cli, ["policy", "list"]).output
    said = run(cli, ["policy", "explain", "licence-server", spec])
    assert (said.exit_code, said.output.splitlines()[0]) == (
        0,
        "licence-server: scope fabric, by itself restart",
    )
    body = yaml.safe_load(run(cli, ["policy", "explain", "hang", "--json"]).output)
    assert (body["name"], body["max_restarts"]) == ("hang", 5)
    overridden = run(cli, ["policy", "list", spec, "--set", "resilience.max_restarts=7"])
    assert "Budget: 7 restarts" in overridden.output


def keys_of(title: str) -> set[str]:
    table = DOCUMENT.split(f"| key of `{title}` |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_the_document_has_every_rule_in_order_and_every_key() -> None:
    table = DOCUMENT.split("## The rules")[1].split("The actions")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == [
        rule.name for rule in default_rules()
    ]
    assert keys_of("failure_classes") == {field.name for field in fields(FailureRule)}
    assert keys_of("policy") == {field.name for field in fields(PolicyRule)}


def with_resilience(tmp_path: Path, **keys: Any) -> str:
    body = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    body["resilience"] |= keys
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(body))
    return str(path)


def test_entries_of_one_class_that_differ_are_explained_each_to_its_end(tmp_path: Path) -> None:
    own = {"name": "disk-full", "scope": "storage", "action": "restart", "patterns": ["no room"]}
    spec = with_resilience(tmp_path, failure_classes=[own])
    rules = names("disk-full", spec)
    assert rules[0] == "the-class-stops"
    assert rules[-1] == "heals-by-itself", "what `decide` takes for a restart of that scope"
    said = explained_text(explain("disk-full", policy_of(spec)))
    theirs = default_classes_of("disk-full")
    assert f"disk-full: scope storage, by itself restart; or {theirs}" in said
    assert f"always of {theirs}: stop, with the advice" in said
    assert "always of scope storage, by itself restart: restart in place" in said


def default_classes_of(name: str) -> str:
    one = next(rule for rule in policy_of(None).classes if rule.name == name)
    return f"scope {one.scope}, by itself {one.action}"


def test_a_plan_for_less_memory_helps_hosts_only_where_their_processors_are_the_devices(
    tmp_path: Path,
) -> None:
    spec = with_resilience(tmp_path, on_oom="replan")
    assert names("cuda-out-of-memory", spec) == ["on-oom"]
    assert names("host-out-of-memory", spec) == ["on-oom-of-processors", "the-class-stops"]
    said = explained_text(explain("host-out-of-memory", policy_of(spec)))
    assert "where the devices are processors: restart with a plan that takes less memory" in said
