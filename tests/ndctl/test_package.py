"""`import ndctl`: what it costs, and what it has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ndctl

IMPORT = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
began = time.perf_counter()
import ndctl
took = time.perf_counter() - began
print(json.dumps({"took_s": took, "modules": sorted(set(sys.modules) - before)}))
"""
MOST_S = 0.1
"""15 ms on an idle machine."""


def test_the_import_is_quick_and_of_the_standard_library_alone() -> None:
    root = str(Path(ndctl.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", IMPORT, root],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = json.loads(done.stdout)
    tops = {name.partition(".")[0] for name in found["modules"]}
    assert tops - {"ndctl"} <= sys.stdlib_module_names
    assert not {name for name in found["modules"] if name.startswith("ndctl.")}
    assert found["took_s"] < MOST_S


def test_the_package_says_what_it_has() -> None:
    assert list(ndctl.__all__) == sorted({*ndctl._SCRIPT, *ndctl._CLIENT, "attempt"})
    for name in ndctl.__all__:
        assert getattr(ndctl, name) is not None
        assert name in dir(ndctl)


def test_a_script_for_another_version_learns_what_this_one_has() -> None:
    has = "CheckpointError, attempt, checkpoint, latest_checkpoint, load_from_memory, log, phase"
    has += ", save_in_memory, should_stop$"
    with pytest.raises(
        AttributeError, match=rf"no attribute 'lgo'; for scripts, ndctl .* has {has}"
    ):
        ndctl.lgo  # noqa: B018
    # Python itself asks for these, and nobody reads the answer.
    with pytest.raises(AttributeError, match=r"no attribute '__path__x'$"):
        ndctl.__path__x  # noqa: B018


@pytest.mark.parametrize("program", ["import ndctl", "import orchestrator, ndctl"])
def test_another_orchestrator_beside_the_notebook_does_no_harm(
    tmp_path: Path, program: str
) -> None:
    """The client gets its own one, or says which one is in its way."""
    (tmp_path / "orchestrator").mkdir()
    for name in ("orchestrator/__init__.py", "trainer.py"):
        (tmp_path / name).touch()
    code = f"{program}; print(ndctl.plan.__module__, ndctl.jobs(run_root='none'))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if program == "import ndctl":
        assert (done.returncode, done.stdout) == (0, "ndctl.client.planning []\n"), done.stderr
    else:
        assert done.returncode == 1
        assert (
            f"another one from {tmp_path / 'orchestrator' / '__init__.py'}; rename" in done.stderr
        )


def test_no_room_takes_the_name_of_a_function() -> None:
    rooms = {path.parent.name for path in Path(ndctl.__file__).parent.glob("*/__init__.py")}
    assert rooms
    assert not rooms & set(ndctl.__all__)
