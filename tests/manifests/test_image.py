"""The Containerfile of the image, executed step by step without a container runtime."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from orchestrator.backends.kubernetes.render.pods import TASK
from orchestrator.contract.files import exit_codes
from orchestrator.contract.spec.kubernetes_spec import KubernetesSpec
from tests.manifests.containerfile import CONTAINERFILE, ROOT, Image, Step, follow, steps_of

STEPS = steps_of(CONTAINERFILE.read_text())
COMPILERS = {"gcc", "g++", "libc6-dev"}
"""Triton builds the launcher of each kernel with a C compiler, torch its kernels for CPUs with one
for C++; both against the C library's headers."""


def test_lines_are_read_as_an_image_builder_reads_them() -> None:
    text = "# a comment\nRUN a \\\n# in between\n  && b\n\nENV A=1 \\\n    B=2\n"
    assert steps_of(text) == [Step("RUN", "a && b"), Step("ENV", "A=1 B=2")]
    with pytest.raises(ValueError, match="HEALTHCHECK"):
        steps_of("HEALTHCHECK NONE\n")


def test_the_recipe_agrees_with_the_project() -> None:
    assert STEPS[0].what == "FROM"
    base = re.fullmatch(
        r"docker\.io/library/python:(\d+\.\d+)\.\d+-slim-bookworm@sha256:\w+", STEPS[0].argument
    )
    assert base is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={base[1]}"
    for step in STEPS:
        if step.what == "COPY":
            *sources, _ = step.argument.split()
            assert all((ROOT / source).exists() for source in sources)
    spec = KubernetesSpec()
    assert Step("USER", f"{spec.run_as_user}:{spec.run_as_group}") in STEPS


def test_the_image_has_a_compiler_for_kernels() -> None:
    (installed,) = (one.argument for one in STEPS if "apt-get install" in one.argument)
    assert set(installed.split()) >= COMPILERS
    assert "--no-install-recommends" in installed


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return follow(tmp_path_factory.mktemp("image") / "made")


@pytest.mark.slow
@pytest.mark.process
def test_every_step_works_and_installs_the_program(image: Image) -> None:
    assert "Print what `submit` starts" in image.run("ndctl --help")
    where = image.run("python -P -c 'import orchestrator; print(orchestrator.__file__)'").strip()
    assert Path(where).is_relative_to(image.folder / "python")
    assert [line.split()[0] for line in image.played] == [
        *("apt-get", "apt-get", "rm"),
        *("groupadd", "useradd"),
    ]


@pytest.mark.slow
@pytest.mark.process
def test_the_installed_package_has_all_its_data(image: Image) -> None:
    """Tables and profiles as well: what it renders is what the checkout renders."""
    spec = ROOT / "examples" / "kubernetes-rdma.yaml"
    own = subprocess.run(
        [sys.executable, "-m", "orchestrator", "render", str(spec)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert image.run(f"ndctl render {spec}") == own.stdout
    wrong = "cluster.kubernetes.pod_template={spec: {nodename: a}}"
    with pytest.raises(RuntimeError, match="did you mean nodeName"):
        image.run(f"ndctl render {spec} --set '{wrong}'")
    assert "repeat-on-host" in image.run("ndctl policy")
    python = KubernetesSpec().python
    said = image.run(f"{python} -P -u -m {TASK} || test $? = {exit_codes.REFUSED}")
    assert "this pod does not belong to a job of this version of ndctl" in said
