"""Names that Kubernetes accepts, in a spec: images, labels, the name of a job."""

import pytest

from orchestrator.contract.spec.kubernetes_spec import IMAGE
from orchestrator.errors import SpecError
from orchestrator.load import load_spec

HEX = "3a7bd3e2360a3d29eea436fcfb7e44c735d117c42d1c1835420b6b9942dd4f1b"
SPEC = "name: {name}\nrun: {{script: a.py}}\ncluster:\n  backend: kubernetes\n  kubernetes:\n"


@pytest.mark.parametrize(
    "image",
    [
        "ndctl",
        "you/ndctl:0.1",
        "ghcr.io/you/nd_ctl/a--b.c:v1_0-RC.1",
        "Registry.Lab:5000/a/b",
        "localhost/a",
        f"us-docker.pkg.dev/p/r/train@sha256:{HEX}",
        f"a/b:1@sha256:{HEX}",
        f"a:{'t' * 128}",
    ],
)
def test_an_image_of_a_registry_is_accepted(image: str) -> None:
    assert IMAGE.admits(image)


@pytest.mark.parametrize(
    "image",
    [
        "ghcr.io/You/NDCTL:latest",
        "NDCTL",
        "a/b@sha256:0123",
        f"a/b@sha256:{HEX.upper()}",
        f"a:{'t' * 129}",
        "a:",
        "a//b",
        "/a",
        "a b",
        "-a/b",
        "a__ _b",
        "a...b",
        "https://ghcr.io/a/b",
        "<IMAGE>",
        "",
    ],
)
def test_an_image_that_no_kubelet_can_parse_is_refused(image: str) -> None:
    assert not IMAGE.admits(image)


def test_an_image_may_be_a_variable() -> None:
    text = f"{SPEC.format(name='a')}    image: ${{IMAGE}}\n"
    assert load_spec(text, "a", environ={"IMAGE": "a/b:1"}).cluster.kubernetes.image == "a/b:1"


def test_all_names_are_checked_in_one_run() -> None:
    text = SPEC.format(name="j" * 55) + (
        "    image: ghcr.io/You/a\n    cpu: 1x\n    namespace: A_b\n"
        "    labels: {a b: c, team: a b}\n    node_selector: {a/b/c: x, d: e f}\n"
    )
    with pytest.raises(SpecError) as refused:
        load_spec(text, "a", ["cluster.kubernetes.labels.late=a/b"])
    said = str(refused.value)
    assert said.startswith("a has 9 problems\n")
    assert said.count("fix: ") == 9
    assert "a:1: name: must be at most 54 long here" in said
    assert "--set cluster.kubernetes.labels.late: must be the value of a label" in said
    assert "a:9: cluster.kubernetes.labels.a b: the key must be the key of a label" in said
    assert "a:9: cluster.kubernetes.labels.team: must be the value of a label" in said
    assert "a:10: cluster.kubernetes.node_selector.a/b/c: the key must be" in said
    assert "a:10: cluster.kubernetes.node_selector.d: must be the value of a label" in said
    assert "annotations" not in said


@pytest.mark.parametrize(("kind", "longest"), [("pytorchjob", 53), ("jobset", 47)])
def test_the_length_of_a_name_depends_on_kind_and_hosts(kind: str, longest: int) -> None:
    options = ["cluster.hosts=12", f"cluster.kubernetes.kind={kind}"]
    load_spec(SPEC.format(name="j" * longest), "a", options)
    with pytest.raises(SpecError, match="shorten it by 1"):
        load_spec(SPEC.format(name="j" * (longest + 1)), "a", options)
