"""Why no agent started on a node, found in the error output of its task."""

from pathlib import Path

import pytest

from orchestrator.backends.slurm import render
from orchestrator.backends.slurm.on_nodes import agents_not_started
from tests.backends.slurm.slurm_launch import a_launch

PYTHON = "/shared/venv/bin/python"
MISSING = f"slurmstepd-node4: error: execve(): {PYTHON}: No such file or directory"


@pytest.mark.parametrize(
    "line",
    [
        MISSING,
        f"slurmstepd: error: execve(): {PYTHON}: Permission denied",
        f"slurmstepd: error: execve(): {PYTHON}: Exec format error",
        f"{PYTHON}: error while loading shared libraries: libpython3.11.so.1.0: cannot open shared"
        " object file: No such file or directory",
        f"{PYTHON}: can't open file '/n/ndctl/run_module.py': [Errno 2] No such file or directory",
        "Fatal Python error: init_fs_encoding: failed to get the Python codec",
        "ModuleNotFoundError: No module named 'orchestrator'",
        "slurmstepd: error: pyxis: failed to import docker image",
    ],
)
def test_the_error_that_ends_a_task_early_is_found_among_warnings(line: str) -> None:
    noise = "slurmstepd: error: couldn't chdir to `/home/me': No such file or directory\n"
    assert agents_not_started.why(f"{noise}{line}\nslurmstepd: error: later\n") == line


@pytest.mark.parametrize(
    "text",
    [
        "",
        "slurmstepd: error: couldn't chdir to `/home/me': No such file or directory: going to /tmp",
        "UserWarning: CUDA initialization: the driver is too old\n  warnings.warn(\n",
        "lmod: module load cuda/12.4",
    ],
)
def test_output_of_a_healthy_agent_before_its_log_is_no_reason(text: str) -> None:
    assert agents_not_started.why(text) == ""


def test_a_node_is_known_by_the_number_of_its_task_in_this_very_run(tmp_path: Path) -> None:
    launch = a_launch(tmp_path)
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_RESTART_COUNT": "1",
        "SLURM_JOB_NODELIST": "node[1-2,4]",
    }
    folder = render.folder(launch)
    folder.mkdir(parents=True)
    (folder / "7-0_1_log.err").write_text("slurmstepd: error: execve(): of the run before: gone")
    (folder / "7-1_0_log.err").write_text("")
    (folder / "7-1_2_log.err").write_text(f"{MISSING}\n")
    nodes = ("node1", "node2", "node4")
    assert agents_not_started.found(launch, environ, nodes) == {"node4": MISSING}
    assert agents_not_started.found(launch, environ, nodes[:2]) == {}, (
        "the agent of node4 has registered"
    )
    (folder / "7.0_1_log.err").write_text(f"{MISSING}\n")
    assert agents_not_started.found(launch, environ, ("node2",)) == {"node2": MISSING}, (
        "the node has a step of its own, because its agent was replaced"
    )
