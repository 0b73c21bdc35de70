"""The table of rights in docs/kubernetes.md equals the Roles."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from orchestrator.backends.kubernetes.render import objects
from orchestrator.backends.kubernetes.resources import JOB_KINDS
from tests.backends.kubernetes.rendered import PLAIN, a_handover
from tests.manifests.examples import ROOT

HEAD = "| who | may | what | which | for |"
PODS = "the pods of a job"
WHO = {
    ("base/job.yaml", "ndctl-nodes"): "pods of the namespace",
    ("base/user.yaml", "ndctl-user"): "people",
    ("base/user.yaml", "ndctl-inventory"): "people, of the whole cluster",
    ("controller/account.yaml", "ndctl-controller"): "the controller",
    ("controller/account.yaml", "ndctl-controller-lease"): "the controller",
    ("controller/account.yaml", "ndctl-controller-nodes"): "the controller",
    ("controller/account.yaml", "ndctl-controller-lease-reader"): "pods of the namespace",
    ("overlays/kueue/readers.yaml", "ndctl-queues"): "people; pods of the namespace",
    ("overlays/kueue/readers.yaml", "ndctl-topologies"): "people, of the whole cluster",
}
"""A Role, with its file -> whose it is, in the table's words."""


@dataclass(frozen=True)
class Row:
    who: str
    verb: str
    what: str
    which: str


def rows_of(who: str, rule: dict[str, Any], job: str = "no job") -> Iterator[Row]:
    names = rule.get("resourceNames", [])
    named = [re.sub(r"worker-\d+", "worker-N", name.replace(job, "JOB", 1)) for name in names]
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            what = f"{resource}.{group}" if group else resource
            for verb in rule["verbs"]:
                for which in named or ["all"]:
                    yield Row(who, verb, what, which)


def rendered() -> set[Row]:
    found: set[Row] = set()
    for kind in JOB_KINDS:
        made = objects(a_handover(PLAIN, kind, hosts=3))
        (role,) = (one for one in made if one["kind"] == "Role")
        for rule in role["rules"]:
            found |= {*rows_of(PODS, rule, "job")}
    for (file, name), who in WHO.items():
        (role,) = (
            one
            for one in yaml.safe_load_all((ROOT / "manifests" / file).read_text())
            if one.get("kind") in ("Role", "ClusterRole") and one["metadata"]["name"] == name
        )
        for rule in role["rules"]:
            found |= {*rows_of(who, rule)}
    return found


def written() -> set[Row]:
    lines = (ROOT / "docs" / "kubernetes.md").read_text().splitlines()
    assert lines.count(HEAD) == 1, "it is one table"
    found, who = set(), ""
    for line in lines[lines.index(HEAD) + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        who = cells[0] or who
        for what in cells[2].split(", "):
            for verb in cells[1].split(", "):
                for which in cells[3].replace("`", "").split(", "):
                    found.add(Row(who, verb, what.strip("`"), which))
    return found


def test_the_table_equals_the_roles() -> None:
    assert sorted(map(str, written() - rendered())) == [], "the table says more"
    assert sorted(map(str, rendered() - written())) == [], "the table says less"


def test_every_role_of_the_manifests_is_in_the_table() -> None:
    files = [*(ROOT / "manifests").glob("*/*.yaml"), *(ROOT / "manifests").glob("overlays/*/*")]
    there = {
        (str(path.relative_to(ROOT / "manifests")), one["metadata"]["name"])
        for path in files
        if path.parent.name not in ("crds", "examples")
        for one in yaml.safe_load_all(path.read_text())
        # A patch of an overlay is a list.
        if isinstance(one, dict) and one.get("kind") in ("Role", "ClusterRole")
    }
    assert there == {*WHO}


@pytest.mark.parametrize(
    ("who", "what"),
    [(PODS, "secrets"), ("the controller", "secrets"), ("pods of the namespace", "secrets")],
)
def test_no_program_of_ndctl_has_a_right_to_any_secret(who: str, what: str) -> None:
    assert not [row for row in rendered() if row.who == who and row.what == what]


def test_only_the_controller_changes_pod_templates() -> None:
    made_from = {one.resource.word for one in JOB_KINDS.values()}
    made_from |= {"trainingruntimes.trainer.kubeflow.org"}
    change = ("create", "update", "patch", "delete", "deletecollection", "*")
    who = {row.who for row in rendered() if row.what in made_from and row.verb in change}
    assert who == {"people", "the controller"}
    programs = {row for row in rendered() if row.who not in ("people", "the controller")}
    changes = {(row.verb, row.what) for row in programs if row.verb in change}
    assert changes == {("patch", "configmaps"), ("create", "events"), ("delete", "pods")}


if __name__ == "__main__":
    for row in sorted(rendered(), key=str):
        print(row)  # noqa: T201
