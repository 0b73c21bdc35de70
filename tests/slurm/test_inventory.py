"""`ndctl inventory` and `ndctl plan` on real Slurm daemons."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.inventory import read_cluster
from orchestrator.inventory.slurm.topology import allocated_switches
from orchestrator.system import SystemClock
from tests.e2e.job import SPEC as JOB
from tests.slurm.capture import TOPOLOGIES
from tests.slurm.testbed import (
    FIRST_WITH_BLOCKS,
    FIRST_WITH_TOPOLOGY_YAML,
    SlurmTestbed,
    running_testbed,
    slurm_version,
)
from tests.testbeds import run_within

pytestmark = [pytest.mark.slurm, pytest.mark.process]


def ndctl(testbed: SlurmTestbed, *args: str) -> str:
    return testbed.output_of(sys.executable, "-m", "orchestrator", *args, timeout=240)


def inventory(testbed: SlurmTestbed, *args: str) -> dict[str, dict[str, Any]]:
    body = json.loads(ndctl(testbed, "inventory", "--backend", "slurm", "--json", *args))
    return {host["name"]: host for host in body["hosts"]}


def plan(testbed: SlurmTestbed, **sets: object) -> dict[str, Any]:
    stdlib = f"data.files={Path(json.__file__).parent}/*.py"
    keys = [f"--set={key.replace('__', '.')}={value}" for key, value in sets.items()]
    args = ("plan", str(JOB), f"--set={stdlib}", "--backend", "slurm", "--json", *keys)
    body: dict[str, Any] = json.loads(ndctl(testbed, *args))
    return body


def _has_a_job(slurm: SlurmTestbed, node: str) -> bool:
    return slurm.node_state(node) != "idle"


def test_hosts_with_their_state_and_switches(slurm: SlurmTestbed) -> None:
    slurm.output_of(
        "sbatch", "-N1", "-w", "node1", "--gpus-per-node=2", "-o/dev/null", "--wrap=sleep 99"
    )
    slurm.output_of(
        "sbatch", "-N1", "-w", "node2", "--gpus-per-node=1", "-o/dev/null", "--wrap=sleep 99"
    )
    slurm.output_of("scontrol", "update", "NodeName=node3", "State=DRAIN", "Reason=ECC errors = 3")
    slurm.kill_node("node4")
    slurm.wait_for("node4 down", lambda: slurm.node_state("node4") == "down*")
    for node in ("node1", "node2"):
        slurm.wait_for(f"the job on {node}", partial(_has_a_job, slurm, node))
    found = inventory(slurm)
    assert {name: (host["state"], host["reason"]) for name, host in found.items()} == {
        "node1": ("busy", "other jobs use all its GPUs"),
        "node2": ("free", ""),
        "node3": ("drained", "drained: ECC errors = 3"),
        "node4": ("drained", "not responding: Not responding"),
    }
    assert {host["profile"] for host in found.values()} == {"cpu"}
    assert found["node2"]["devices"] == 1
    assert found["node4"]["switches"] == ["spine", "leaf2"]


def test_a_plan_uses_free_hosts_and_notes_if_the_job_must_wait(slurm: SlurmTestbed) -> None:
    slurm.output_of(
        "sbatch", "-N1", "-w", "node1", "--gpus-per-node=2", "-o/dev/null", "--wrap=sleep 99"
    )
    slurm.wait_for("the job", lambda: slurm.node_state("node1") != "idle")
    assert set(plan(slurm)["hosts"]) == {"node3", "node4"}  # They share a leaf switch.
    waits = plan(slurm, cluster__hosts=4)
    assert set(waits["hosts"]) == set(slurm.names)
    assert any("only 3 of 4 hosts are free" in note for note in waits["notes"])


def test_no_answer_gives_a_readable_error(slurm: SlurmTestbed) -> None:
    slurm.stop_ctld()
    done = slurm([sys.executable, "-m", "orchestrator", "inventory", "--backend", "slurm"])
    assert done.code == 6
    assert "Unable to contact slurm controller" in done.err
    assert "scontrol ping" in done.err


def test_the_error_on_a_machine_without_slurm_names_where_to_run_the_command(
    tmp_path: Path,
) -> None:
    argv = [sys.executable, "-m", "orchestrator", "inventory", "--backend", "slurm"]
    done = run_within(argv, {"PATH": str(tmp_path)}, 240)
    assert done.code == 6
    assert "there is no Slurm here" in done.err


def test_the_leader_of_an_allocation_learns_its_switches(slurm: SlurmTestbed) -> None:
    script = "echo $SLURM_JOB_NODELIST; scontrol show topology"
    nodelist, topology = slurm.output_of("srun", "-N1", "-w", "node3", "sh", "-c", script).split(
        "\n", 1
    )
    assert allocated_switches(nodelist, topology) == {"node3": ("spine", "leaf2")}


@pytest.mark.usefixtures("slurm_available")
def test_gpus_without_a_type_and_partitions() -> None:
    parts = "\n".join(
        [
            "PartitionName=train Nodes=node[1-2] Default=YES State=UP",
            "PartitionName=test Nodes=node3 State=UP",
        ]
    )
    with running_testbed(3, 1, {"TB_GPU_TYPE": "", "TB_PARTITIONS": parts}) as testbed:
        found = inventory(testbed, "--partition", "test")
        assert {name: host["profile"] for name, host in found.items()} == {"node3": None}
        assert {node.name for node in read_cluster(Slurm(testbed, SystemClock()), None).nodes} == {
            "node1",
            "node2",
        }


@pytest.mark.usefixtures("slurm_available")
def test_a_plan_for_blocks_asks_for_a_segment(tmp_path: Path) -> None:
    if slurm_version() < FIRST_WITH_BLOCKS:
        pytest.skip("Slurm has topology/block from 23.11 on")
    with running_testbed(4, 2, {"TB_TOPOLOGY": "block"}) as testbed:
        cluster = read_cluster(Slurm(testbed, SystemClock()), None)
        assert cluster.topology.kind == "block"
        assert {host: cluster.topology.blocks[host] for host in testbed.names} == {
            "node1": "block1",
            "node2": "block1",
            "node3": "block2",
            "node4": "block2",
        }
        stdlib = f"--set=data.files={Path(json.__file__).parent}/*.py"
        script = ndctl(testbed, "render", str(JOB), stdlib, "--backend", "slurm")
        assert "#SBATCH --segment=2" in script.splitlines()
        (tmp_path / "job.sh").write_text(script)
        output = testbed(["sbatch", "--test-only", str(tmp_path / "job.sh")])
        assert output.code == 0, output.err
        assert any(f"on nodes node[{pair}] " in output.err for pair in ("1-2", "3-4")), output.err


@pytest.mark.usefixtures("slurm_available")
def test_a_partition_has_the_topology_that_topology_yaml_gives_it() -> None:
    if slurm_version() < FIRST_WITH_TOPOLOGY_YAML:
        pytest.skip("Slurm has topology.yaml from 25.05 on")
    parts = "PartitionName=train Nodes=ALL Default=YES State=UP\n"
    parts += "PartitionName=nv Nodes=ALL State=UP Topology=nvlink"
    knobs = {"TB_TOPOLOGY_YAML": TOPOLOGIES, "TB_PARTITIONS": parts}
    with running_testbed(8, 1, knobs) as testbed:
        slurm = Slurm(testbed, SystemClock())
        default, nvlink = (read_cluster(slurm, name).topology for name in ("train", "nv"))
    assert (default.kind, default.switches["node8"]) == ("tree", ("spine", "leaf2"))
    assert (nvlink.kind, nvlink.blocks["node8"]) == ("block", "b4")
