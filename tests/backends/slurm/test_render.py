import shlex
from pathlib import Path

import pytest

from orchestrator.backends.slurm.render import replacement, script
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.slurm import ContainerSpec, SlurmSpec
from tests.backends.slurm.slurm_launch import a_launch

GOLDEN = Path(__file__).parent / "golden"

FULL = SlurmSpec(
    partition="train",
    account="ml",
    qos="high",
    time="1-00:00:00",
    gpu_type="h100",
    gres="nvme:1",
    cpus_per_task=64,
    mem="500G",
    constraint="ib&h100",
    nodelist="node[1-8]",
    exclude="node3",
    reservation="lab",
    licenses="sim:2",
    switches="1@10:00",
    segment=2,
    comment="it's mine; all of it",
    mail_type="END,FAIL",
    mail_user="me@example.org",
    notice_s=119.5,
    modules=("cuda/12.4", "nccl"),
    setup=("ulimit -n 65536", 'source "$HOME/env"'),
    container=ContainerSpec(
        image="nvcr.io#nvidia/pytorch:26.09-py3",
        mounts=("/runs:/runs", "/data:/data:ro"),
        workdir="/workspace",
        env=("HF_HOME",),
        python="python",
    ),
    sbatch_args=("--nice=5", "-H"),
    srun_args=("--mpi=none",),
    snapshot=True,
)


@pytest.mark.parametrize(
    ("name", "launch"),
    [
        ("plain", a_launch()),
        ("full", a_launch("/runs/a b/job", 3, FULL)),
        ("gres", a_launch(slurm=SlurmSpec(gpus="gres", gpu_type="a100", gres="nvme:1"))),
        ("cpu", a_launch(slurm=SlurmSpec(gpus="none", exclusive=False, mem="0"))),
    ],
)
def test_the_script_is_as_in_the_golden_file(name: str, launch: LaunchPlan) -> None:
    golden = GOLDEN / f"{name}.sh"
    assert script(launch, "/venv/bin/python") == golden.read_text()


def test_hosts_of_the_launch_that_are_to_be_left_out_join_those_of_the_spec() -> None:
    from dataclasses import replace

    launch = replace(a_launch(slurm=SlurmSpec(exclude="n[1-2]")), exclude=("n7", "n9"))
    assert "#SBATCH --exclude='n[1-2],n7,n9'" in script(launch, "python").splitlines()


def test_a_preempt_signal_in_the_environment_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("submitit.slurm.slurm.SlurmJobEnvironment.USR_SIG", "USR1")
    assert "#SBATCH --signal=USR2@90" in script(a_launch(), "python").splitlines()


def test_an_agent_is_started_again_on_its_own_node_beside_the_others() -> None:
    argv = replacement(a_launch("/runs/job", 2, FULL), "12", "node3", "/venv/bin/python")
    text = shlex.join(argv)
    assert "--container-image=nvcr.io#nvidia/pytorch:26.09-py3" in text
    place = " --jobid=12 --overlap --nodelist=node3 --nodes=1 --ntasks=1 "
    assert "--mpi=none" in text.partition(place)[0], "of two options that clash, the last counts"
    assert text.endswith(
        " python -P -u -m orchestrator.backends.slurm.task --run-dir=/runs/job --launch=1"
        " --devices=2 --agent-timeout=10.0"
    )
