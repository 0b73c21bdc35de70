"""`ndctl calibrate`: which hosts it measures, and a real run."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from orchestrator.app.planning.calibrations import hosts_at_hand, measure, ranks_here, torchrun
from orchestrator.errors import BackendError, SpecError
from orchestrator.inventory.profiles import load_profile
from orchestrator.seams import Completed
from tests.calibrate.samples import measured
from tests.plan.history.jobs import EXAMPLES

STEP = {
    "SLURM_JOB_ID": "30123",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
}


def test_a_terminal_measures_this_machine_alone() -> None:
    for environ in ({}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}):
        found = hosts_at_hand(environ)
        assert (found.names, found.rank) == (("127.0.0.1",), 0)


def test_a_job_step_measures_its_nodes_and_all_tasks_name_the_same_port() -> None:
    found = hosts_at_hand(STEP)
    first = hosts_at_hand({**STEP, "SLURM_NODEID": "0"})
    assert (found.names, found.rank) == (("node3", "node4"), 1)
    assert (first.rank, first.port) == (0, found.port)
    words = torchrun(found, 8, ["/tmp/x/out.json", "60.0"], "python3")
    assert "--nnodes=2" in words
    assert "--nproc-per-node=8" in words
    assert f"--rdzv-endpoint=node3:{found.port}" in words
    assert "--rdzv-conf=rank=1" in words
    assert "--local-addr=node4" in words


def test_a_job_step_with_several_tasks_on_a_node_is_refused() -> None:
    with pytest.raises(SpecError, match="16 tasks on 2 nodes") as caught:
        hosts_at_hand({**STEP, "SLURM_STEP_NUM_TASKS": "16"})
    assert "--ntasks-per-node=1" in caught.value.fix


def test_a_host_has_as_many_ranks_as_gpus_and_one_without() -> None:
    assert ranks_here({"CUDA_VISIBLE_DEVICES": "0,1,2"}, None) == 3
    assert ranks_here({"CUDA_VISIBLE_DEVICES": ""}, None) == 1
    assert ranks_here({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2) == 2


def test_the_first_host_reads_what_all_ranks_measured_and_errors_have_a_reason() -> None:
    found = measured(load_profile("cpu"))

    def shell(argv: Sequence[str], /, *, timeout: float) -> Completed:
        Path(argv[-2]).write_bytes(msgspec.json.encode(found))
        return Completed(0, "", "")

    def broken(argv: Sequence[str], /, *, timeout: float) -> Completed:
        ends = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
        return Completed(1, "", f"x\n[rank0]: RuntimeError: no route to node4\n{ends}\ny")

    def hangs(argv: Sequence[str], /, *, timeout: float) -> Completed:
        raise TimeoutError(f"torchrun did not end within {timeout:.0f} s")

    first = hosts_at_hand({})
    assert measure(first, 4, 60.0, shell) == found
    assert measure(hosts_at_hand(STEP), 4, 60.0, shell) is None
    with pytest.raises(BackendError, match="no route to node4"):
        measure(first, 4, 60.0, broken)
    with pytest.raises(BackendError, match="did not end within"):
        measure(first, 4, 60.0, hangs)


@pytest.mark.slow
@pytest.mark.process
def test_two_real_ranks_write_a_profile_that_plan_uses(tmp_path: Path) -> None:
    file = tmp_path / "here.yaml"
    words = ("calibrate", "--ranks", "2", "--budget", "25", "--write", str(file), "--json")
    body = json.loads(ndctl(*words))
    assert body["file"] == str(file)
    assert body["measurements"]["ranks_per_host"] == 2
    kinds = {sample["what"] for sample in body["measurements"]["samples"]}
    assert {"product", "all-gather", "all-to-all"} <= kinds
    profile = load_profile(str(file))
    assert profile.flops["float32"] == body["profile"]["flops"]["float32"]
    spec = str(EXAMPLES / "quickstart.yaml")
    plan = json.loads(ndctl("plan", spec, "--inventory", str(file), "--no-history", "--json"))
    assert plan["time"]["certainty"] == "calibrated"
    guessed = json.loads(ndctl("plan", spec, "--no-history", "--json"))
    assert plan["time"]["step_s"] != guessed["time"]["step_s"]


def ndctl(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", *words],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
