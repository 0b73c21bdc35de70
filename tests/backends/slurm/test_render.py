import shlex
from pathlib import Path

import pytest

from orchestrator.backends.slurm.render import replacement, script
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.spec.slurm_spec import ContainerSpec, HooksSpec, SlurmSpec
from tests.backends.handover import handover_of
from tests.backends.slurm.slurm_launch import a_launch, portable

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


def rendered(launch: LaunchPlan) -> str:
    return script(handover_of(launch), "/venv/bin/python", Path("/home/me"))


@pytest.mark.parametrize(
    ("name", "launch"), [("plain", a_launch()), ("full", a_launch("/runs/a b/job", 3, FULL))]
)
def test_the_script_equals_the_golden_file(name: str, launch: LaunchPlan) -> None:
    golden = GOLDEN / f"{name}.sh"
    assert portable(rendered(launch), Path("/home/me")) == golden.read_text()


@pytest.mark.parametrize(
    ("spec", "requests"),
    [
        (
            SlurmSpec(gpus="gres", gpu_type="a100", gres="nvme:1"),
            ["--gres=gpu:a100:2,nvme:1", "--exclusive"],
        ),
        (SlurmSpec(gpus="none", exclusive=False, mem="0"), ["--mem=0"]),
    ],
)
def test_the_way_to_request_devices_changes_no_other_line(
    spec: SlurmSpec, requests: list[str]
) -> None:
    lines = (GOLDEN / "plain.sh").read_text().splitlines()
    at = lines.index("#SBATCH --gpus-per-node=2")
    lines[at : at + 2] = [f"#SBATCH {option}" for option in requests]
    assert portable(rendered(a_launch(slurm=spec)), Path("/home/me")).splitlines() == lines


def test_excluded_hosts_of_the_launch_are_added_to_those_of_the_spec() -> None:
    from msgspec.structs import replace

    launch = replace(a_launch(slurm=SlurmSpec(exclude="n[1-2]")), exclude=("n7", "n9"))
    assert "#SBATCH --exclude='n[1-2],n7,n9'" in rendered(launch).splitlines()


def test_an_agent_restarts_on_its_own_node_alongside_the_others() -> None:
    argv = replacement(a_launch("/runs/job", 2, FULL), "12", "node3", "/venv/bin/python")
    text = shlex.join(argv)
    assert "--container-image=nvcr.io#nvidia/pytorch:26.09-py3" in text
    place = " --jobid=12 --overlap --nodelist=node3 --nodes=1 --ntasks=1 "
    assert "--mpi=none" in text.partition(place)[0], (
        "of two conflicting options, the last one counts"
    )
    assert text.endswith(
        " python -P -u /runs/job/snapshot/orchestrator/run_module.py"
        " orchestrator.backends.entry.slurm_task"
        " --run-dir=/runs/job --launch=1 --devices=2 --agent-timeout=10.0"
    )


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ({"switches": "2"}, "--switches=2@1:00"),
        ({"switches": "2", "switch_wait": "0"}, "--switches=2@0"),
        ({"switches": 2, "switch_wait": 3}, "--switches=2@3"),
        ({"switches": "2@10:00", "switch_wait": 3}, "--switches=2@10:00"),
    ],
)
def test_switches_are_requested_with_the_longest_wait(keys: dict[str, object], asked: str) -> None:
    spec = SlurmSpec(**keys)  # type: ignore[arg-type]
    lines = rendered(a_launch(slurm=spec)).splitlines()
    assert f"#SBATCH {asked}" in lines
    assert "--switches" not in rendered(a_launch())


def test_variables_umask_and_hooks_are_in_the_script_and_quoted() -> None:
    hooks = HooksSpec(before="test -d '/a b'", after="rm -rf /scratch/x", timeout=60.5)
    env = {"NCCL_DEBUG": "INFO", "NOTE": "it's $HOME"}
    spec = SlurmSpec(env=env, mode=750, hooks=hooks, partition=("train", "debug"))
    launch = a_launch(slurm=spec)
    lines = rendered(launch).splitlines()
    assert "#SBATCH --partition=train,debug" in lines
    assert "umask 0027" in lines
    assert lines.index("export NCCL_DEBUG=INFO") < lines.index("srun --unbuffered \\")
    assert """export NOTE='it'"'"'s $HOME'""" in lines
    (step,) = [line for line in lines if "--first-leads" in line]
    words = shlex.split(step.removesuffix(" && exit"))
    assert words[-4:] == [
        *("--before=test -d '/a b'", "--before-limit=60.5"),
        *("--after=rm -rf /scratch/x", "--after-limit=30"),
    ]
    again = replacement(launch, "12", "node1", "python")
    assert again[-2:] == ["--after=rm -rf /scratch/x", "--after-limit=30"]
    assert not any(word.startswith("--before") for word in again), "the node was prepared before"


def test_variables_of_the_spec_override_those_of_the_image() -> None:
    container = ContainerSpec(image="a.sqsh", mounts=("/runs:/runs",), env=("HF_HOME",))
    spec = SlurmSpec(container=container, env={"NCCL_DEBUG": "INFO"})
    assert "--container-env=HF_HOME,NCCL_DEBUG" in rendered(a_launch(slurm=spec))
