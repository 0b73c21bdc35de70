"""`ndctl policy` lists the rules for a failure class, and docs/recover.md has the same table."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from msgspec.structs import fields

from orchestrator.app.policies import explain, explained_text, listed_text, policy_of
from orchestrator.cli import cli
from orchestrator.contract.codec import decode
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.contract.spec.policy import RENAMED, PolicyRule
from orchestrator.errors import SpecError
from orchestrator.job.failures.policy import default_rules, options

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "recover.md").read_text()
OWN: dict[str, Any] = yaml.safe_load(
    DOCUMENT.split("```yaml\n")[1].split("```")[0]  # the example in the document
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
        ("disk-full", ["class-stop"]),
        ("infiniband-error", ["repeat-on-host", "second-strike", "transient-backoff"]),
        ("scheduler-sigterm", ["scheduler-signal"]),
        ("gpu-lost", ["class-default"]),
        (
            "python-exception",
            ["repeated-error", "crash-loop", "class-budget", "class-default"],
        ),
    ],
)
def test_rules_of_a_class_are_listed_in_order_up_to_one_that_always_matches(
    name: str, rules: list[str]
) -> None:
    assert names(name) == rules


def test_every_class_has_a_rule_that_always_matches() -> None:
    found = policy_of(None)
    for rule in found.classes:
        final = explain(rule.name, found).rules[-1]
        assert (final.times, final.phases) == (1, ())


def test_rules_and_classes_of_a_spec_have_priority(spec: str) -> None:
    assert names("licence-server", spec) == ["licences-come-back"]
    assert names("disk-full", spec) == ["saving-fails-thrice", "class-stop"]
    said = explained_text(explain("licence-server", policy_of(spec)))
    assert "detected by: log lines that match licence .* refused" in said
    assert (
        "1 licences-come-back  always: restart on the same hosts; from the 2nd failure of the same"
        " class wait about 60 s first, doubled each time up to 900 s"
    ) in said
    assert "Budget: after 5 restarts without a new checkpoint" in said
    assert "After 3 allocations in a row without a new checkpoint" in said


def test_an_unknown_class_is_refused_with_the_nearest_name() -> None:
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
def test_a_class_is_found_by_a_prefix_of_its_name_and_by_its_xid(said: str, name: str) -> None:
    assert explain(said, policy_of(None)).name == name


@pytest.mark.parametrize("said", ["nccl", "xid"])
def test_an_ambiguous_prefix_is_refused_with_all_matching_names(said: str) -> None:
    with pytest.raises(SpecError) as caught:
        explain(said, policy_of(None))
    fix = str(caught.value.fix)
    classes = {rule.name for rule in policy_of(None).classes if rule.name.startswith(f"{said}-")}
    assert all(name in fix for name in classes)


def test_the_list_shows_every_rule_and_class_once() -> None:
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
        "licence-server: scope fabric, action restart",
    )
    body = yaml.safe_load(run(cli, ["policy", "explain", "hang", "--json"]).output)
    assert (body["name"], body["max_restarts"]) == ("hang", 5)
    overridden = run(cli, ["policy", "list", spec, "--set", "resilience.max_restarts=7"])
    assert "Budget: after 7 restarts" in overridden.output


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


def test_entries_of_one_class_with_different_actions_are_explained_separately(
    tmp_path: Path,
) -> None:
    own = {"name": "disk-full", "scope": "storage", "action": "restart", "patterns": ["no room"]}
    spec = with_resilience(tmp_path, failure_classes=[own])
    rules = names("disk-full", spec)
    assert rules[0] == "class-stop"
    assert rules[-1] == "transient-backoff", "the rule that `decide` uses for this scope and action"
    said = explained_text(explain("disk-full", policy_of(spec)))
    theirs = default_classes_of("disk-full")
    assert f"disk-full: scope storage, action restart; or {theirs}" in said
    assert f"always, if {theirs}: stop and print the advice" in said
    assert "always, if scope storage, action restart: restart on the same hosts" in said


def default_classes_of(name: str) -> str:
    one = next(rule for rule in policy_of(None).classes if rule.name == name)
    return f"scope {one.scope}, action {one.action}"


def test_replan_applies_to_host_memory_only_when_the_job_trains_on_cpus(
    tmp_path: Path,
) -> None:
    spec = with_resilience(tmp_path, on_oom="replan")
    assert names("cuda-out-of-memory", spec) == ["on-oom"]
    assert names("host-out-of-memory", spec) == ["on-oom-cpu", "class-stop"]
    said = explained_text(explain("host-out-of-memory", policy_of(spec)))
    assert "if the job trains on CPUs: restart with a plan that needs less memory" in said


@pytest.mark.parametrize(("former", "now"), RENAMED.items())
def test_a_former_rule_name_in_a_spec_is_refused_with_the_current_name(
    former: str, now: str, tmp_path: Path
) -> None:
    own = [{"name": "mine", "action": "class"}, {"name": former, "action": "restart"}]
    with pytest.raises(SpecError) as caught:
        policy_of(with_resilience(tmp_path, policy=own))
    assert "resilience.policy[1].name: must be another name" in str(caught.value)
    assert f"fix: write {now}, or a name of your own" in str(caught.value)


def test_the_list_shows_only_current_rule_names() -> None:
    chosen = options("replan", "rollback", on_processors=True)
    listed = {rule.name for rule in (*chosen, *default_rules())}
    assert set(RENAMED.values()) <= listed
    assert not set(RENAMED) & listed


def test_a_journal_with_a_rule_under_its_former_name_is_read() -> None:
    assert decode(PolicyRule, {"name": "same-error-twice", "action": "stop"}).action == "stop"
