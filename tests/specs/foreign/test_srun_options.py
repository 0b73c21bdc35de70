"""Options that srun itself gets, in a job and outside of one."""

import pytest

from orchestrator.specs.foreign.batch_script import from_script
from orchestrator.specs.foreign.carried import Carried
from orchestrator.specs.foreign.srun_options import of_srun

SIZED = "#!/bin/bash\n#SBATCH -N 2 --gpus-per-node=4\n"


def taken(text: str) -> Carried:
    return from_script(text, "script")


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("srun -ul --environment=box.toml bash -c x", ["-ul", "--environment=box.toml"]),
        ("time srun -N 2 --label -n8 box -V a:b", ["-N", "2", "--label", "-n8"]),
        (
            "srun --container-mount-home --gpu-bind none t.py",
            "--container-mount-home|--gpu-bind|none",
        ),
        ("srun --network tcp --resv-ports ./fit.sh", ["--network", "tcp", "--resv-ports"]),
        ("srun --propagate python t.py", ["--propagate"]),
        ("torchrun --nnodes 2 t.py", []),
    ],
)
def test_options_end_where_the_program_begins(line: str, options: list[str] | str) -> None:
    expected = options.split("|") if isinstance(options, str) else options
    assert of_srun(line.split()) == expected


def test_options_for_the_step_are_kept_or_said() -> None:
    carried = taken(
        f"{SIZED}srun --label -o out.txt --environment=box.toml --cpu-bind=none --mpi=pmix"
        " --gpu-bind=map:0,1,2,3 torchrun --nproc_per_node=4 t.py --environment=dev\n"
    )
    slurm = carried.cluster["slurm"]
    assert slurm["srun_args"] == ["--environment=box.toml", "--cpu-bind=none"]
    assert carried.left == [
        "srun --mpi=pmix: ranks have the variables of torchrun, and are not of MPI",
        "srun --gpu-bind=map:0,1,2,3: it places several tasks of a host, and ndctl starts one",
    ]
    assert carried.run["args"] == ["--environment=dev"]


def test_srun_outside_of_a_job_asks_for_one() -> None:
    carried = taken(
        "#!/bin/bash\nsrun -A lab -p big -t 2:00:00 --nodes=2 --gres=gpu:3090:4 -J fit -u"
        " python fit.py\n"
    )
    slurm = carried.cluster["slurm"]
    assert (carried.name, carried.cluster["hosts"], carried.cluster["gpus_per_host"]) == (
        *("fit", 2),
        4,
    )
    assert {key: slurm[key] for key in ("account", "partition", "time", "gpus", "gpu_type")} == {
        "account": "lab", "partition": "big", "time": "2:00:00", "gpus": "gres", "gpu_type": "3090",
    }  # fmt: skip
    assert "srun_args" not in slurm
    assert not any("cluster.hosts" in one for one in carried.before)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("#!/bin/bash\nsrun python fit.py\n", True),
        ("#!/bin/bash\n#SBATCH -p big\nsrun -N $SLURM_NNODES python fit.py\n", True),
        ("#!/bin/bash\nN=`wc -l < $PBS_NODEFILE`\nmpiexec -n $N -ppn 4 python fit.py\n", True),
        ("#!/bin/bash\nH=/job/hostfile\ndeepspeed --hostfile $H fit.py\n", True),
        ("#!/bin/bash\n#SBATCH -p big\nsrun python fit.py\n", False),
        ("#!/bin/bash\n#SBATCH -p big\nsrun -N 4 fit.sh $SLURM_NNODES\n", False),
        ("#!/bin/bash\n#SBATCH -N 2\nsrun -N $SLURM_NNODES python fit.py\n", False),
        ("#!/bin/bash\ntorchrun --nproc_per_node=2 fit.py\n", False),
    ],
)
def test_a_number_of_hosts_that_the_script_gets_is_asked_for(text: str, asked: bool) -> None:
    said = "set cluster.hosts: the script does not say how many hosts"
    assert (said in taken(text).before) is asked


def test_an_option_of_sbatch_with_spaces_before_it_is_pointed_out() -> None:
    carried = taken("  #!/bin/bash\n  #SBATCH -p big\n  srun python fit.py\n")
    assert any(one.startswith("move #SBATCH to the start of its line") for one in carried.before)


def test_a_number_in_a_variable_is_no_program() -> None:
    carried = taken("#!/bin/bash\nmpirun -np 16 -N $EACH --hostfile $H ./solve -x\n")
    assert carried.run == {"program": "./solve", "args": ["-x"]}


@pytest.mark.parametrize(
    ("line", "left"),
    [
        (
            "mpirun -np 8 --bind-to core -map-by slot ./fit --map-by x",
            "--bind-to core -map-by slot",
        ),
        ("mpirun --bind-to=core python t.py --bind-to y", "--bind-to=core"),
        ("mpiexec -n 8 --cpu-bind depth -d 16 python t.py", "--cpu-bind depth"),
        ("mpirun -np 8 --report-bindings --bind-to none python t.py", None),
        ("torchrun t.py --bind-to x", None),
    ],
)
def test_how_mpirun_places_ranks_is_noted(line: str, left: str | None) -> None:
    expected = f"mpirun {left}: ndctl starts one rank per GPU, bound to no core"
    assert taken(f"{SIZED}{line}\n").left == ([] if left is None else [expected])


@pytest.mark.parametrize(
    ("line", "cpus"),
    [
        ("srun -c 32 torchrun --nproc-per-node 4 t.py", 32),
        ("srun -n 8 -c 4 python t.py", 16),
        ("srun --ntasks-per-node=4 -c4 python t.py", 16),
        ("srun -n $N -c 4 python t.py", None),
        ("srun -c $SLURM_CPUS_PER_TASK python t.py", None),
    ],
)
def test_cpus_that_srun_alone_asks_for_are_those_of_a_host(line: str, cpus: int | None) -> None:
    assert taken(f"{SIZED}{line}\n").cluster["slurm"].get("cpus_per_task") == cpus
    job = f"{SIZED}#SBATCH -c 8\n{line}\n"
    assert taken(job).cluster["slurm"]["cpus_per_task"] == 8
