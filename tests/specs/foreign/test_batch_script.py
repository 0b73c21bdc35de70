"""Batch scripts as people write them: arrays, defaults, `bash -c`, launchers in variables."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli import cli
from orchestrator.load import load_spec
from orchestrator.specs.foreign.batch_script import from_script, options_in
from orchestrator.specs.foreign.carried import Carried
from orchestrator.specs.foreign.shell.script import read_shell

ARRAYS = """#!/bin/bash
#SBATCH --nodes=3 # how many
#SBATCH --job-name=big_FSDP
#SBATCH --output=logs/%x_%j.out
#SBATCH --exclusive
set -ex;
GPUS=8   # on each
: "${STEPS:=50}"
export NCCL_DEBUG=INFO
export RUNNER=torchrun
if [ ! -z $IMAGE_FILE ]; then
    export WHAT=./inside.py
    declare -a BOX=( --container-image $IMAGE_FILE )
fi
declare -a RUN_ARGS=(
    --nproc_per_node=$GPUS   # as above
    --nnodes=$SLURM_JOB_NUM_NODES
    --rdzv_endpoint=$(hostname)
)
export WHAT=${WHAT:=../src/train.py}
declare -a MORE=( --steps=$STEPS --name "a b" )
srun -l "${BOX[@]}" ${RUNNER} "${RUN_ARGS[@]}" $WHAT "${MORE[@]}"
"""
IN_A_STRING = r"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
#SBATCH --gres=gpu:h100:4,nvme:1
#SBATCH -c 38
#SBATCH -p big -t 1-00:00:00
#SBATCH --dependency=singleton
module load cuda/12 && conda activate lab
pushd /data/code
python prepare.py
WEIGHTS=/data/weights
ARGS="\
    --layers 24 \
    --save $WEIGHTS \
"
CMD=" /data/code/pretrain.py \
    $ARGS --load $WEIGHTS "
export LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node 4 --nnodes $SLURM_NNODES \
    --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT "
echo $CMD
export OMP_NUM_THREADS=$((38 / 2))
clear; srun --wait=60 bash -c "$LAUNCHER --node_rank \$SLURM_PROCID: $CMD" 2>&1 | tee log
"""
ONE_TASK_PER_GPU = """#!/bin/bash
#SBATCH -N2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
export WORLD_SIZE=$(($SLURM_NNODES * $SLURM_NTASKS_PER_NODE))
export LD_LIBRARY_PATH=/opt/efa/lib:$LD_LIBRARY_PATH
export TMP_OF_JOB=/scratch/$SLURM_JOB_ID
srun --container-image /img/a.sqsh --container-mounts /d:/d,/e:/e \\
  --container-writable python -u fit.py fit
"""


def taken(text: str) -> Carried:
    return from_script(text, "script")


def spec_of(carried: Carried) -> Any:
    text = carried.text("script.sbatch")
    return load_spec(text, "job.yaml", environ=dict.fromkeys(re.findall(r"\$\{(\w+)", text), "2"))


def test_arrays_defaults_and_branches_are_followed() -> None:
    carried = taken(ARRAYS)
    spec = spec_of(carried)
    assert spec.run.words == ("../src/train.py", "--steps=50", "--name", "a b")
    assert spec.run.env == {"NCCL_DEBUG": "INFO"}
    assert (spec.name, spec.cluster.hosts, spec.cluster.gpus_per_host) == ("big_FSDP", 3, 8)
    # The script asks Slurm for whole hosts alone.
    assert (spec.cluster.slurm.gpus, spec.cluster.slurm.exclusive) == ("none", True)
    assert carried.notes() == []


def test_a_command_line_in_a_string_is_read() -> None:
    carried = taken(IN_A_STRING)
    spec = spec_of(carried)
    slurm = spec.cluster.slurm
    assert spec.run.script == "/data/code/pretrain.py"
    assert spec.run.args == ("--layers", "24", "--save", "/data/weights", "--load", "/data/weights")
    assert spec.run.workdir == "/data/code"
    assert spec.run.env == {"OMP_NUM_THREADS": "19"}
    assert (spec.cluster.hosts, spec.cluster.gpus_per_host) == (2, 4)
    assert (slurm.gpus, slurm.gpu_type, slurm.gres) == ("gres", "h100", "nvme:1")
    assert (slurm.partition, slurm.time, slurm.cpus_per_task) == ("big", "1-00:00:00", 38)
    assert slurm.modules == ("cuda/12",)
    assert slurm.setup == ("conda activate lab",)
    said = "\n".join(carried.notes())
    assert "not taken over: #SBATCH --dependency=singleton: submit with --after JOB" in said
    assert "not taken over: line 9: python prepare.py" in said
    assert "echo" not in said
    assert "install ndctl in the environment that cluster.slurm.setup activates" in said


def test_a_server_beside_the_training_is_not_the_job() -> None:
    text = """#!/bin/bash
#SBATCH --nodes=3
LAUNCH="accelerate launch --num_machines 2"
for ((i=8; i>=1; i--)); do echo $i; done
srun --container-image ./rl.sqsh --nodes=2 bash -c "$LAUNCH /app/rl.py --server node3" &
srun --container-image ./rl.sqsh -w node3 trl vllm-serve --model m &
wait
"""
    carried = from_script(text, "rl")
    assert carried.run["script"] == "/app/rl.py"
    server, *advice = carried.left
    assert "line 6: srun" in server
    assert len(advice) == 1, "arithmetic is no command"


def test_a_value_of_srun_is_no_program() -> None:
    text = "#!/bin/bash\nsrun --container-image ./x.sqsh -w node3 ./solver --steps 3\n"
    assert from_script(text, "a").run["program"] == "./solver"


def test_one_task_per_gpu_becomes_one_per_host() -> None:
    carried = taken(ONE_TASK_PER_GPU)
    spec = spec_of(carried)
    assert spec.run.words == ("fit.py", "fit")
    assert (spec.cluster.hosts, spec.cluster.gpus_per_host) == (2, 4)
    assert spec.cluster.slurm.cpus_per_task == 32
    assert spec.cluster.slurm.container.image == "/img/a.sqsh"
    assert spec.cluster.slurm.container.mounts == ("/d:/d", "/e:/e")
    # WORLD_SIZE is what ndctl sets; the folder of the job is known to the shell alone.
    assert spec.run.env == {"LD_LIBRARY_PATH": "/opt/efa/lib:2"}
    said = "\n".join(carried.notes())
    assert "export TMP_OF_JOB: only the script's shell knows" in said
    assert "--container-writable" in said


@pytest.mark.parametrize(
    ("lines", "sizes"),
    [
        ("#SBATCH --gres=gpu:8  # number", (1, 8)),
        ("#SBATCH -N 4\n#SBATCH --gres=gpu:hgx:8", (4, 8)),
        ("#SBATCH --nodes=2 --gpus-per-node h100:4", (2, 4)),
        ("#SBATCH -N2\n#SBATCH --gres=gpu:A100-SXM4-80GB:8(S:0-1)", (2, 8)),
        ("#SBATCH -N 4 --ntasks=4 --gpus-per-task=8", (4, 8)),
        ("#SBATCH -N 2 --ntasks=8 --gpus-per-task=1", (2, 4)),
        ("#SBATCH -N 2 -G 16", (2, 8)),
        ("#SBATCH --nodes=$HOSTS --gpus-per-node=8", ("${HOSTS}", 8)),
        ("#SBATCH -N 2", (2, 1)),
    ],
)
def test_hosts_and_gpus(lines: str, sizes: tuple[Any, int]) -> None:
    carried = taken(f"#!/bin/bash\n{lines}\nsrun python train.py\n")
    assert (carried.cluster["hosts"], carried.cluster["gpus_per_host"]) == sizes
    unsaid = any("does not say how many GPUs" in one for one in carried.before)
    assert unsaid == (lines == "#SBATCH -N 2")


def test_settings_of_accelerate_that_ranks_would_miss_are_named() -> None:
    line = "accelerate launch --config_file f.yaml --num_machines 2 --mixed_precision bf16 t.py --x"
    said = "\n".join(taken(f"#!/bin/bash\n#SBATCH -N2 -G 2\nsrun {line}\n").notes())
    assert "hands --config_file f.yaml, --mixed_precision bf16 to the script" in said
    done = CliRunner().invoke(cli, ["run", "--", *line.split()])
    assert "hands --config_file f.yaml, --mixed_precision bf16 to the script" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("#SBATCH -J a --exclusive -p b", {"job_name": "a", "exclusive": "", "partition": "b"}),
        ("#SBATCH --mail-type=begin\n#SBATCH --mail-type=end", {"mail_type": "begin,end"}),
        ("##SBATCH -N 4", {}),
        ("#SBATCH --comment='it''s' # x", {"comment": "its"}),
        ("#SBATCH --comment=it's", {"comment": "it's"}),
    ],
)
def test_options_of_sbatch(words: str, options: dict[str, str]) -> None:
    assert options_in(words) == options


def test_init_writes_the_spec_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.sbatch").write_text(IN_A_STRING)
    done = CliRunner().invoke(cli, ["init", "--from", "job.sbatch"])
    assert done.exit_code == 0, done.output
    assert "not taken over: line 9: python prepare.py" in done.output
    assert "wrote job.yaml; check it with `ndctl validate job.yaml`" in done.output
    text = Path("job.yaml").read_text()
    assert "# not taken over: line 9: python prepare.py" in text
    assert load_spec(text, "job.yaml").name == "script" or "name: job" in text
    again = CliRunner().invoke(cli, ["init", "--from", "job.sbatch"])
    assert "job.yaml exists" in str(again.exception)


PIECES = ["if", "then", "fi", "else", "for x in a", "do", "done", "$(", ")", "((", "))", '"', "'",
          "\\", "\n", ";", "&&", "|", "${A:-", "}", "$A", "A=", "A=(", "A+=(b", "srun", "bash -c",
          "torchrun", "t.py", "#", "`", "case", "esac", ">", "2>&1", "export", " ", "${A[@]}",
          "$((1/0))", "$((", "cd", "#SBATCH -N", "\0", "<<EOF", "\nEOF\n", "\nf() {\n", "\n}\n",
          "f", "${A:-\"", "singularity exec", "module use",
          "export A=$A$A$A", "#SBATCH hetjob"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=40).map(" ".join))
def test_any_script_gets_an_answer(text: str) -> None:
    read_shell(text, {})
    assert taken(text).text("x").startswith("# A job of ndctl")


def test_an_argument_of_the_script_is_asked_for() -> None:
    carried = from_script(
        "#SBATCH -N 2 --gres=gpu:4\nMODEL=$2\nPYTHONPATH=$1/deps:$PYTHONPATH srun torchrun"
        " --nnodes 2 --nproc-per-node 4 ${1}/train.py --model $MODEL\n",
        "job",
    )
    assert carried.run["script"] == "${1}/train.py"
    assert carried.run["env"] == {"PYTHONPATH": "$1/deps:${PYTHONPATH:-}"}
    assert "replace $1, $2 in run, which are arguments of the script" in carried.before


def test_a_script_that_names_nothing_of_slurm_is_for_this_machine() -> None:
    carried = from_script(
        "#!/bin/bash\nsource venv/bin/activate\ntorchrun --nproc_per_node=2 train.py\n", "job"
    )
    assert carried.cluster == {"backend": "local", "hosts": 1, "gpus_per_host": 2}
    assert carried.before == ["type in the shell that submits: source venv/bin/activate"]


def test_arguments_of_the_script_have_their_numbers() -> None:
    carried = taken(
        '#!/bin/bash\nPYTHONPATH="$(dirname $0)/..":$PYTHONPATH torchrun --nproc_per_node=2 t.py'
        ' --n $# --a ${10} --b $2 --c ${3:-x} --d ${!X} ${@:3} "${@:2}" $*\n'
    )
    assert carried.run["args"][:6] == ["--n", "$#", "--a", "${10}", "--b", "$2"]
    assert carried.run["args"][-2:] == ["--d", "${!X}"]
    assert "replace $#, $2, ${10} in run, which are arguments of the script" in carried.before
    note = "export PYTHONPATH: only the script's shell knows $(dirname $0)/..:${PYTHONPATH}"
    assert note in carried.left


def test_what_a_shell_expands_is_replaced_or_asked_for() -> None:
    carried = taken(
        "#!/bin/bash\nexport A=~/a:~/b B='~/b'\ncd ~/code\nMORE='--m out/*.pt'\n"
        "torchrun --nproc_per_node=2 t.py ~/d --d=~/d X=~/d '~/e' a~/f d/*.json \"q/*.json\" $MORE"
        ' {0..3}.bin --layers=[0]*3 \'{"a","b"}\'\n'
    )
    assert carried.run["args"] == [
        *("${HOME}/d", "--d=~/d", "X=${HOME}/d", "~/e", "a~/f", "d/*.json", "q/*.json", "--m"),
        *("out/*.pt", "{0..3}.bin", "--layers=[0]*3", '{"a","b"}'),
    ]
    assert carried.run["env"] == {"A": "${HOME}/a:${HOME}/b", "B": "~/b"}
    assert carried.run["workdir"] == "${HOME}/code"
    said = [one for one in carried.before if "a shell expands it" in one]
    assert [one.split()[1] for one in said] == ["d/*.json", "out/*.pt", "{0..3}.bin"]


def test_the_folder_of_the_script_is_asked_for() -> None:
    carried = from_script(
        'cd "$(dirname "${BASH_SOURCE[0]}")"\nsrun -N 1 --gpus-per-node 8 python train.py', "job"
    )
    assert "workdir" not in carried.run
    assert any(one.startswith("set run.workdir: only the script's shell") for one in carried.before)


def test_a_comment_ends_with_its_line_and_documents_are_no_commands() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 2 --gpus-per-node=4\n"
        "cat <<EOT > ds.json\n{\n  srun: python other.py\n}\nEOT\n"
        "#srun -n 1 python old.py \\\n"
        "srun python new.py --deepspeed ds.json\n"
    )
    assert carried.run == {"script": "new.py", "args": ["--deepspeed", "ds.json"]}
    assert carried.left[0] == "line 3: cat <<EOT > ds.json"
    assert len(carried.left) == 2


def test_defaults_may_be_quoted() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 1\n"
        ': ${ROOT:="/data/my lab"}\n: ${STEPS:=5}  # how many\nKIND="${KIND:-"a b"}"\n'
        'export CACHE=${ROOT}/cache\nsrun python t.py --steps $STEPS --kind "$KIND"\n'
    )
    assert carried.run["args"] == ["--steps", "5", "--kind", "a b"]
    assert carried.run["env"] == {"CACHE": "/data/my lab/cache"}


def test_a_branch_for_other_places_than_a_job_is_not_entered() -> None:
    carried = taken(
        '#!/bin/bash\n#SBATCH -N 1\nif [ -z "$SLURM_JOB_ID" ]; then\n  export ALONE=1\nelse\n'
        "  export IN_JOB=1\nfi\nsrun python t.py\n"
    )
    assert carried.run["env"] == {"IN_JOB": "1"}


@pytest.mark.parametrize(
    ("line", "program"),
    [
        (
            "singularity exec --nv -B /d:/d x.sif torchrun --nproc_per_node=8 t.py --a 1",
            ["singularity", "exec", "--nv", "-B", "/d:/d", "x.sif", "python", "t.py", "--a", "1"],
        ),
        (
            "apptainer run $SIF python3 -u -m pkg.train --b",
            ["apptainer", "run", "/img/x.sif", "python3", "-m", "pkg.train", "--b"],
        ),
        (
            "shifter -V /d:/e bash -c 'source $HERE/vars.sh; python t.py \"$@\"'",
            ["shifter", "-V", "/d:/e", "bash", "-c", "source $HERE/vars.sh; exec python t.py"],
        ),
    ],
)
def test_a_container_that_is_not_of_pyxis_stays_in_the_command(
    line: str, program: list[str]
) -> None:
    carried = taken(f"#!/bin/bash\n#SBATCH -N 2 --gpus-per-node=8\nSIF=/img/x.sif\nsrun {line}\n")
    assert [carried.run["program"], *carried.run["args"]] == program
    assert any(one.startswith(f"check run: {program[0]} starts") for one in carried.before)
    # What the shell in the container does is not done on the host.
    assert "setup" not in carried.cluster["slurm"]


def test_functions_run_where_they_are_called() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 2\n"
        "on_signal() {\n  scontrol requeue $SLURM_JOB_ID\n}\ntrap on_signal USR1\n"
        'launch () {\n  srun --gpus-per-node=4 bash -c "torchrun --nproc-per-node 4 $*"\n}\n'
        "launch fit.py --steps 3\n"
    )
    assert carried.run == {"script": "fit.py", "args": ["--steps", "3"]}
    assert carried.cluster["gpus_per_host"] == 4
    assert any("trap on_signal USR1" in one for one in carried.left)
    assert not any("scontrol" in one for one in carried.left)


def test_ranks_of_slurm_are_not_those_of_torchrun() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 2 --gpus-per-node=8\n"
        "srun singularity run x.sif bash -c 'export RANK=$SLURM_PROCID; cd /w; python t.py'\n"
    )
    assert carried.run["args"] == ["run", "x.sif", "bash", "-c", "cd /w; exec python t.py"]


def test_a_quoted_word_is_no_redirection() -> None:
    carried = taken('#!/bin/bash\n#SBATCH -N 1\nsrun python t.py --want ">5" --x 2 > log\n')
    assert carried.run["args"] == ["--want", ">5", "--x", "2"]


def test_a_placeholder_is_one_word_and_asked_for() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 1\nDATA=<PATH TO DATA>_text_document\n"
        'ARGS="\n  --data $DATA \\\n  --tok=<tokenizer>\n"\n'
        "srun python t.py $ARGS --out <OUT DIR>/x --lr 1 <in >log\n"
    )
    assert carried.run["args"] == [
        *("--data", "<PATH TO DATA>_text_document"), "--tok=<tokenizer>",
        *("--out", "<OUT DIR>/x"), "--lr", "1",
    ]  # fmt: skip
    asked = [one for one in carried.before if one.startswith("replace <")]
    assert asked == [
        "replace <PATH TO DATA> in run", "replace <tokenizer> in run", "replace <OUT DIR> in run",
    ]  # fmt: skip


def test_what_only_the_shell_knows_is_asked_for_in_mounts() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 1\nexport ARGS='--a 1'\nKIND=${1:-small}\n"
        'srun --container-image a.sqsh --container-mounts "$(realpath ..):/d" torchrun'
        " --nproc_per_node=$GPUS t.py $ARGS $KIND\n"
    )
    assert carried.run == {"script": "t.py", "args": ["--a", "1", "small"]}
    assert carried.cluster["gpus_per_host"] == "${GPUS}"
    said = "replace $(realpath ..):/d in cluster.slurm.container.mounts, which only"
    assert any(one.startswith(said) for one in carried.before)


def test_a_loop_over_values_is_asked_for() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 1\nfor lr in 1e-3 3e-4; do\n  srun python t.py --lr $lr\ndone\n"
    )
    said = "replace ${lr} in run: the script starts the program in a loop over 1e-3 3e-4"
    assert any(one.startswith(said) for one in carried.before)


@pytest.mark.parametrize(
    ("lines", "around"),
    [
        ("module load a b/1\nml c", {"modules": ["a", "b/1", "c"]}),
        (
            "module use /opt/mine\nmodule load a",
            {"setup": ["module use /opt/mine", "module load a"]},
        ),
        ("source init.sh\nmodule load a", {"setup": ["source init.sh", "module load a"]}),
        ("module load a\nsource v", {"modules": ["a"], "setup": ["source v"]}),
        ("ml --force purge\nml a", {"setup": ["ml --force purge", "ml a"]}),
    ],
)
def test_modules_keep_their_order(lines: str, around: dict[str, Any]) -> None:
    slurm = taken(f"#!/bin/bash\n#SBATCH -N 1\n{lines}\nsrun python t.py\n").cluster["slurm"]
    assert {key: slurm[key] for key in ("modules", "setup") if key in slurm} == around


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--image=lab/torch:2", "sbatch_args", ["--image=lab/torch:2"]),
        ("--signal=B:USR1@300", "notice_s", 300),
        ("--mem-per-cpu=4G --ntasks-per-node=2 --cpus-per-task=8", "mem", "64G"),
        ("--mem-per-gpu=60G --gpus-per-node=8", "mem", "480G"),
        ("--cpus-per-gpu=7 --gpus-per-node=8", "cpus_per_task", 56),
        ("--tasks-per-node=2 --cpus-per-task=4", "cpus_per_task", 8),
    ],
)
def test_an_option_becomes_a_key(option: str, key: str, value: Any) -> None:
    carried = taken(f"#!/bin/bash\n#SBATCH -N 2 {option}\nsrun python t.py\n")
    assert carried.cluster["slurm"][key] == value
    assert not any(one.startswith(f"#SBATCH {option.split('=')[0]}:") for one in carried.left)


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ("--ntasks=16 --ntasks-per-node=8", 2),
        ("--nodes=2-4", 2),
        ("-N 3\n#SBATCH hetjob\n#SBATCH -N 1 -p other", 3),
    ],
)
def test_the_number_of_hosts(options: str, hosts: int) -> None:
    carried = taken(f"#!/bin/bash\n#SBATCH {options}\nsrun python t.py\n")
    assert carried.cluster["hosts"] == hosts
    assert "partition" not in carried.cluster["slurm"]


def test_what_the_job_would_miss_is_told() -> None:
    said = "\n".join(
        taken(
            "#!/bin/bash\n#SBATCH -N 1 --signal=USR1@60 --no-requeue --ntasks-per-socket=2\n"
            "#SBATCH hetjob\n#SBATCH -N 1\nsrun python t.py --rank ${NAMES[0]}\n"
        ).notes()
    )
    for words in (
        "ranks get SIGTERM 60 s before the time limit, not USR1",
        "#SBATCH --no-requeue: ndctl requeues the job",
        "#SBATCH --ntasks-per-socket=2: ndctl sets it itself",
        "#SBATCH hetjob: all hosts are alike",
        "replace ${NAMES[0]} in run",
    ):
        assert words in said


def test_exported_variables_reach_the_ranks() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 1 --export=ALL,A=1\nexport TOOLS=$PWD/deepspeed\n"
        "export CACHE=/c WORK=$SCRATCH/w\n"
        "srun --export=ALL,B=2 env C=3 python t.py --cache $CACHE\n"
    )
    assert carried.run["env"] == {
        "A": "1",
        "B": "2",
        "C": "3",
        "CACHE": "/c",
        "TOOLS": "${PWD}/deepspeed",
        "WORK": "${SCRATCH}/w",
    }
    assert carried.notes()[0].endswith("to replace here: SCRATCH")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "body",
    [
        "f() {\n" + "f $@\n" * 60 + "}\nf a b\n",
        "f() {\n" * 20_000,
        "cat <<EOF\n" * 20_000,
        "f() {\n" + "shift\n" * 3_000 + "}\nf a b\n",
    ],
    ids=["calls", "functions", "documents", "shifts"],
)
def test_a_script_that_never_ends_is_read_in_time(body: str) -> None:
    carried = from_script(f"#!/bin/bash\n#SBATCH -N 2\n{body}\nsrun python train.py\n", "job")
    assert carried.cluster["hosts"] == 2


def test_a_redirection_to_a_quoted_file_ends_there() -> None:
    carried = taken(
        '#!/bin/bash\nwhile read -r host; do\n  echo "$host"\ndone <"$HOSTS" >"$OUT"\n\n'
        'mpirun -np 8 --npernode 4 python fit.py --name "a b" >"$OUT" 2>&1\n'
    )
    assert carried.run == {"script": "fit.py", "args": ["--name", "a b"]}
    assert (carried.cluster["hosts"], carried.cluster["gpus_per_host"]) == (2, 4)


def test_items_of_an_array_without_quotes_are_split() -> None:
    text = '#!/bin/bash\nMORE=("--kind small one" "")\ntorchrun --nproc_per_node=2 a.py {} --end\n'
    split = ["--kind", "small", "one", "--end"]
    assert taken(text.format("${MORE[@]}")).run["args"] == split
    whole = ["--kind small one", "", "--end"]
    assert taken(text.format('"${MORE[@]}"')).run["args"] == whole
    joined = ["--kind small one ", "--end"]
    assert taken(text.format('"${MORE[*]}"')).run["args"] == joined


def test_a_form_of_a_variable_that_only_a_shell_knows_stays_one_word() -> None:
    carried = taken("#!/bin/bash\ntorchrun --nproc_per_node=2 a.py --name=${TASK// /_}-1\n")
    assert carried.run["args"] == ["--name=${TASK// /_}-1"]
    assert any("only the script's shell knows" in one for one in carried.before)


def test_hosts_of_a_launcher_are_a_variable_or_asked_for() -> None:
    text = "#!/bin/bash\ntorchrun --nnodes {} --nproc_per_node 8 a.py\n"
    assert taken(text.format("$COUNT")).cluster["hosts"] == "${COUNT}"
    assert taken(text.format("$COUNT:$COUNT")).cluster["hosts"] == "${COUNT}"
    asked = taken(text.format("$(wc -l < hosts)"))
    assert "set cluster.hosts: a launcher gets $(wc -l < hosts) hosts" in asked.before
    ranks = taken("#!/bin/bash\nmpirun -np $(cat count) python a.py\n")
    assert "set cluster.hosts: a launcher starts $(cat count) ranks" in ranks.before


def test_a_script_that_srun_starts_keeps_its_container() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 2 --gres=gpu:8\nsrun --container-image=/img/a.sqsh \\\n"
        "  bash -c 'export NODE=$SLURM_NODEID; ./inside.sh --fast'\n"
    )
    assert carried.run["program"] == "./inside.sh"
    assert carried.run["args"] == ["--fast"]
    assert carried.cluster["slurm"]["container"]["image"] == "/img/a.sqsh"


def test_what_a_container_does_around_the_program_is_kept_or_said() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 1\nsrun apptainer exec img.sif bash -c '\n"
        "  time cp /data/a /tmp; time python fit.py; time cp /tmp/out /data'\n"
    )
    assert carried.run["args"][-1] == "time cp /data/a /tmp; exec python fit.py"
    said = "line 3: time cp /tmp/out /data (in the container, after the program)"
    assert any(one.startswith("line 3: time cp /tmp/out") for one in carried.left), said


def test_placeholders_of_a_template_become_variables() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -p { queue }\n#SBATCH -A <your account>\n#SBATCH -N {{ count }}\n"
        '#SBATCH -t {LIMIT}\nsrun --container-image "<the image>" python a.py\n'
    )
    slurm = carried.cluster["slurm"]
    assert (slurm["partition"], slurm["account"]) == ("${queue}", "${YOUR_ACCOUNT}")
    assert (slurm["time"], carried.cluster["hosts"]) == ("${LIMIT}", "${count}")
    assert slurm["container"]["image"] == "${THE_IMAGE}"
    assert spec_of(carried).cluster.hosts == 2


def test_placeholders_in_a_command_become_variables_and_braces_of_a_shell_stay() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -A {{ a.b }}\nCMD='t.py --a {{ a }}'\nMORE=\"--b {{b | int}}/c\"\n"
        "echo x | awk '{{ print $1 }}'\nsrun python t.py --c {{ c }} --d=\"{{ d.e }}\" $MORE \\\n"
        "  --f '{{ f }}' --g '{\"x\": {{1}}}' --h {h} --i={i} --j {a,b} ${K}\n"
    )
    assert carried.run["args"] == [
        *("--c", "${c}", "--d=${d_e}", "--b", "${b}/c", "--f", "{{ f }}", "--g", '{"x": {{1}}}'),
        *("--h", "{h}", "--i={i}", "--j", "{a,b}", "${K}"),
    ]
    assert carried.cluster["slurm"]["account"] == "${a_b}"
    for one in ("{h}", "{i}"):
        assert f"replace {one} in run, if a template has it" in carried.before


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--account=[budget code]", "account", "${BUDGET_CODE}"),
        ("-p [PARTITION]", "partition", "${PARTITION}"),
        ("--qos=YOUR_QOS", "qos", "${YOUR_QOS}"),
        ("--nodelist=node[1-4]", "nodelist", "node[1-4]"),
        ("-w [a,b]c", "nodelist", "[a,b]c"),
        ("--constraint=[rack1|rack2]", "constraint", "[rack1|rack2]"),
    ],
)
def test_words_in_brackets_are_placeholders_and_lists_are_not(
    option: str, key: str, value: str
) -> None:
    carried = taken(f"#!/bin/bash\n#SBATCH -N 2\n#SBATCH {option}\nsrun python t.py\n")
    assert carried.cluster["slurm"][key] == value


def test_a_script_that_starts_ray_says_so() -> None:
    carried = taken("#!/bin/bash\nray start --head\nray job submit -- python3 -m lab.ppo --x 1\n")
    assert any("starts a Ray cluster, and ndctl does not" in one for one in carried.before)
    commented = taken("#!/bin/bash\n# ray start\ntorchrun --nproc_per_node=2 a.py\n")
    assert commented.before == []


def test_visible_devices_are_the_gpus_if_nothing_else_says_them() -> None:
    text = "#!/bin/bash\nexport CUDA_VISIBLE_DEVICES=0,1,2\n{} a.py\n"
    assert taken(text.format("python")).cluster["gpus_per_host"] == 3
    assert taken(text.format("torchrun --nproc_per_node=2")).cluster["gpus_per_host"] == 2


def test_a_script_behind_a_shell_is_the_program() -> None:
    carried = taken(
        "#!/bin/bash\ntorchrun --nproc_per_node=2 --no-python bash worker_command.sh 1\n"
    )
    assert carried.run == {"program": "bash", "args": ["worker_command.sh", "1"]}


def test_a_name_of_any_length_is_one_that_a_spec_takes() -> None:
    carried = from_script("torchrun --nproc_per_node=2 a.py\n", f"{'a' * 39}-{'b' * 9}")
    assert spec_of(carried).name == "a" * 39


def test_a_long_script_has_its_first_lines_said() -> None:
    lines = "".join(f"prepare {number}\n" for number in range(300))
    carried = taken(f"#!/bin/bash\n{lines}torchrun --nproc_per_node=2 a.py\n")
    assert "200 more lines, from line 102" in carried.left
    assert len(carried.left) == 102


def test_eval_runs_its_line() -> None:
    carried = taken('#!/bin/bash\nrun="torchrun --nproc_per_node=2 a.py --x 1"\neval ${run}\n')
    assert carried.run == {"script": "a.py", "args": ["--x", "1"]}
    assert carried.left == []


def test_a_program_around_the_launcher_is_said() -> None:
    carried = taken(
        "#!/bin/bash\nA=1 nsys profile -o out torchrun --nproc_per_node=2 $SCRIPT --x 1\n"
    )
    assert (carried.run["script"], carried.run["args"]) == ("${SCRIPT}", ["--x", "1"])
    assert (
        "line 2: nsys profile -o out around the program: ndctl starts the program itself"
        in carried.left
    )
    python = taken("#!/bin/bash\nnumactl --membind=0 python a.py\n")
    assert (
        "line 2: numactl --membind=0 around the program: ndctl starts the program itself"
        in python.left
    )


@pytest.mark.parametrize("line", ["git commit -m fix", "install -m 0755 a b", "mkdir -m 700 out"])
def test_not_each_m_is_a_module_of_python(line: str) -> None:
    carried = taken(f"#!/bin/bash\n{line}\n")
    assert "set run: no program was found that runs on each rank" in carried.before


def test_a_file_that_the_script_writes_for_its_program_is_said() -> None:
    carried = taken(
        '#!/bin/bash\necho "{}" > conf/ds.json\necho started > log.txt\n'
        "torchrun --nproc_per_node=2 a.py --config=conf/ds.json\n"
    )
    assert any(one.startswith('line 2: echo "{}" > conf/ds.json') for one in carried.left)
    assert not any("log.txt" in one for one in carried.left)


def test_text_for_a_variable_that_is_set() -> None:
    text = '#!/bin/bash\n{}\ntorchrun --nproc_per_node=2 a.py ${{SIZE:+--size "$SIZE"}} --end\n'
    assert taken(text.format("SIZE=4")).run["args"] == ["--size", "4", "--end"]
    assert taken(text.format("")).run["args"] == ["--end"]


def test_variables_of_tmux_reach_the_ranks() -> None:
    carried = taken(
        "#!/bin/bash\nxargs -a hosts -I {} ssh {} tmux new -d -e HF_HOME=/data \\\n"
        "  python -m torch.distributed.run --nproc-per-node 8 a.py -e B=2\n"
    )
    assert carried.run["env"] == {"HF_HOME": "/data"}
    assert carried.run["args"] == ["-e", "B=2"]


def test_a_segment_is_a_number() -> None:
    carried = taken("#!/bin/bash\n#SBATCH -N 2 --segment=2\nsrun torchrun a.py\n")
    assert spec_of(carried).cluster.slurm.segment == 2


def test_gpus_without_a_number_are_one() -> None:
    carried = taken("#!/bin/bash\n#SBATCH -N 2 --gres=gpu:h100\nsrun torchrun a.py\n")
    assert carried.cluster["gpus_per_host"] == 1
    assert carried.cluster["slurm"]["gpu_type"] == "h100"


def test_arguments_keep_their_numbers_behind_shift() -> None:
    carried = taken(
        "#!/bin/bash\nHOST=$1\nshift\nCONF=$1\nshift 2\n"
        "torchrun --nproc_per_node=2 a.py $CONF ${1:-x} $1\n"
    )
    assert carried.run["args"] == ["$2", "x", "$4"]
    assert "replace $2, $4 in run, which are arguments of the script" in carried.before


def test_a_variable_from_a_here_document_is_read() -> None:
    carried = taken(
        "#!/bin/bash\nread -r -d '' line <<EOF\nlab.fit \\\n   --lr 1 \\\n   --name \"a b\"\nEOF\n"
        "deepspeed --num_gpus 4 --module $line\n"
    )
    assert carried.run["module"] == "lab.fit"
    assert carried.run["args"][:2] == ["--lr", "1"]
    assert carried.cluster["gpus_per_host"] == 4


def test_the_launcher_says_its_ranks_and_not_srun() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH --nodes=3\nsrun --nodes=2 --ntasks=2 \\\n"
        "  bash -c 'accelerate launch --num_processes 16 a.py'\n"
    )
    assert carried.cluster["gpus_per_host"] == 8
    note = "check cluster.hosts: the script takes 3 nodes, and starts the program on 2"
    assert note in carried.before


def test_tasks_without_nodes_are_said() -> None:
    carried = taken("#!/bin/bash\n#SBATCH -n 384 --gpus-per-node=8\nsrun python a.py\n")
    note = "set cluster.hosts: the script asks for 384 tasks, not for nodes"
    assert note in carried.before


def test_sets_of_resources_are_no_ranks() -> None:
    carried = taken("#!/bin/bash\n#BSUB -nnodes 2\njsrun -n 2 --tasks_per_rs 6 python a.py\n")
    assert (carried.cluster["hosts"], carried.cluster["gpus_per_host"]) == (2, 6)


def test_hosts_that_an_argument_says_are_asked_for() -> None:
    carried = taken("#!/bin/bash\nshift\nN=$1\ntorchrun --nnodes $N:$N --nproc_per_node=2 a.py\n")
    assert carried.cluster["hosts"] == 1
    assert "set cluster.hosts: a launcher gets $2:$2 hosts" in carried.before


def test_a_line_of_options_without_an_option_says_nothing() -> None:
    carried = from_script("#!/bin/bash\n#SBATCH \n#SBATCH --nodes=2\nsrun python fit.py\n", "a")
    assert carried.cluster["hosts"] == 2


def test_a_type_of_gpu_and_of_exclusive_use_are_kept() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 1 --ntasks-per-node=4 --gpus-per-task=a100:1 --exclusive=user\n"
        "srun python t.py\n"
    )
    slurm = carried.cluster["slurm"]
    assert (carried.cluster["gpus_per_host"], slurm["gpu_type"]) == (4, "a100")
    assert (slurm["exclusive"], slurm["sbatch_args"]) == (False, ["--exclusive=user"])
    spec_of(carried)


def test_tasks_of_each_gpu_have_its_cpus() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 2 --gpus=16 --ntasks-per-gpu=1 -c 6\nsrun python t.py\n"
    )
    assert carried.cluster["slurm"]["cpus_per_task"] == 48


@pytest.mark.parametrize(
    ("tasks", "cpus"),
    [
        ("--nodes=2 --ntasks=8", 16),
        ("--nodes=2 --ntasks-per-node=4", 16),
        ("--ntasks=4", 16),
        ("--ntasks=384", 16),  # on an unknown number of hosts, with 4 GPUs each
        ("--nodes=2", 4),
    ],
)
def test_the_one_task_of_a_host_has_what_all_its_tasks_had(tasks: str, cpus: int) -> None:
    carried = taken(
        f"#!/bin/bash\n#SBATCH {tasks} --cpus-per-task=4 --mem-per-cpu=4G --gres=gpu:4\n"
        "srun python t.py\n"
    )
    slurm = carried.cluster["slurm"]
    assert (slurm["cpus_per_task"], slurm["mem"]) == (cpus, f"{4 * cpus}G")


@pytest.mark.parametrize(
    ("options", "line", "often"),
    [
        ("-N 2 --gpus-per-node=4", "srun python t.py", "once"),
        ("-N 2 --gpus-per-node=4", "python t.py", "once"),
        ("-N 2 --ntasks=4 --gpus-per-node=4", "srun python t.py", "2 times"),
        ("-N 2 --ntasks=8 --gpus-per-node=4", "srun python t.py", None),
        ("-N 2 --gpus-per-node=4", "srun --ntasks-per-node=4 python t.py", None),
        ("-N 2 --gpus-per-node=4 --ntasks-per-gpu=1", "srun python t.py", None),
        ("-N 2 --gpus-per-node=4", "srun torchrun --nproc-per-node 4 t.py", None),
        ("-N 2 --gpus-per-node=4", "mpirun -np 2 python t.py", None),
        ("-N 2 --gpus-per-node=4", "horovodrun -np 8 python t.py", None),
        ("-N 2 --gpus-per-node=1", "srun python t.py", None),
    ],
)
def test_a_program_that_starts_fewer_times_than_there_are_gpus_is_asked_for(
    options: str, line: str, often: str | None
) -> None:
    before = taken(f"#!/bin/bash\n#SBATCH {options}\n{line}\n").before
    said = [one for one in before if one.startswith("check run: the script starts")]
    assert [f"starts t.py {often} per host, and ndctl" in one for one in said] == (
        [] if often is None else [True]
    )


@pytest.mark.parametrize(
    ("include", "hosts", "gpus"),
    [
        ("localhost:0,1,2,3", 1, 4),
        ("a@b:0,2", 2, 2),
        ("a:1@b:0@c:5", 3, 1),
    ],
)
def test_the_gpus_that_deepspeed_includes_are_counted(include: str, hosts: int, gpus: int) -> None:
    carried = taken(f"#!/bin/bash\ndeepspeed --include {include} t.py --include d:1,2,3,4,5\n")
    assert (carried.cluster["hosts"], carried.cluster["gpus_per_host"]) == (hosts, gpus)
    assert carried.before == []


def test_a_value_with_quotes_is_one_word_in_the_script_of_a_shell() -> None:
    carried = taken(
        "#!/bin/bash\nPORT=$(python -c 'import socket; print(socket.socket())')\n"
        "srun bash -c \"python t.py --url 'tcp://h:$PORT' --b \\'nccl\\' --c $PORT 3\"\n"
    )
    value = "$(python -c 'import socket; print(socket.socket())')"
    url = f"tcp://h:{value}"
    assert carried.run["args"] == ["--url", url, "--b", "'nccl'", "--c", value, "3"]
    assert carried.left == []


def test_what_changes_the_variables_of_a_job_is_kept_or_said() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 2\nulimit -n 65536\nunset LD_PRELOAD\nexport $(cat .env | xargs)\n"
        "export A=1 B=2 F=$'x\\ty'\nunset A\nset -a\n. ./more\nC=3\nset +a\nD=4\nsrun python t.py\n"
        "unset B\n"
    )
    assert carried.run["env"] == {"B": "2", "F": "x\ty", "C": "3"}
    assert carried.cluster["slurm"]["setup"] == ["set -a; . ./more; set +a"]
    assert carried.left[:3] == [
        "line 3: ulimit -n 65536",
        "line 4: unset LD_PRELOAD",
        "line 5: export $(cat .env | xargs)",
    ]
    assert len(carried.left) == 4


def test_options_of_python_and_torchrun_that_ranks_do_not_have_are_said() -> None:
    carried = taken(
        "#!/bin/bash\npython -u -W ignore -X dev -m torch.distributed.run --nproc_per_node=2"
        " --max_restarts=3 --local-ranks-filter 0 t.py -O --max_restarts 4\n"
    )
    said = [one.split(": ")[1] for one in carried.left]
    assert said == [
        *("python -W ignore", "python -X dev", "torch.distributed.run --max_restarts=3"),
        "torch.distributed.run --local-ranks-filter 0",
    ]


def test_a_training_behind_if_is_the_training() -> None:
    for word in ("if", "if !"):
        carried = taken(
            f"#!/bin/bash\n{word} torchrun --nproc_per_node 2 t.py --a; then exit 1; fi\n"
        )
        assert carried.run == {"script": "t.py", "args": ["--a"]}
    other = taken(
        "#!/bin/bash\nif [ 1 = 2 ]; then\nif torchrun t.py; then exit; fi\n"
        "elif torchrun --nproc_per_node 4 u.py; then exit; fi\n"
    )
    assert other.run["script"] == "u.py"


def test_a_number_of_the_program_is_no_size_of_the_job() -> None:
    carried = taken("#!/bin/bash\nmpirun -np 4 mdtest -n 10000\ntorchrun $X --nproc_per_node 3\n")
    assert carried.cluster["gpus_per_host"] == 1


def test_a_script_without_options_asks_for_its_gpus() -> None:
    carried = taken("#!/bin/bash\nsrun python t.py\n")
    assert carried.cluster["backend"] == "slurm"
    assert "gpus" not in carried.cluster["slurm"]


def test_what_a_loop_exports_is_asked_for() -> None:
    carried = taken("#!/bin/bash\nfor m in a b; do\nexport MODEL=$m\ntorchrun t.py\ndone\n")
    assert any(one.startswith("replace ${m} in run: ") for one in carried.before)


def test_a_program_that_starts_others_is_asked_for() -> None:
    deep = taken("#!/bin/bash\npython deep.py train.py conf.yml\n")
    said = "check run: if deep.py starts train.py on each rank, as a launcher does, train.py is"
    assert f"{said} run.script" in deep.before
    own = taken("#!/bin/bash\nsrun bash around.sh python train.py\n")
    assert "line 2: around.sh around the program: ndctl starts the program itself" in own.left
    uv = taken("#!/bin/bash\nsrun uv run python train.py\n")
    assert any("`uv run ndctl submit`" in one for one in uv.before)


def test_a_module_that_prepares_python_is_no_training() -> None:
    carried = taken("#!/bin/bash\npython3 -m venv env\npython -m pip install x\n")
    assert "set run: no program was found that runs on each rank" in carried.before


def test_a_script_in_a_container_starts_python_itself() -> None:
    carried = taken(
        "#!/bin/bash\n#SBATCH -N 1\nsrun apptainer exec -B $(realpath w):/w a.sif ./go.sh t.py 1\n"
    )
    assert carried.run["args"][-3:] == ["./go.sh", "t.py", "1"]
    assert any(one.startswith("replace $(realpath w):/w in run") for one in carried.before)


def test_a_variable_in_single_quotes_is_not_for_the_shell_in_a_container() -> None:
    carried = taken(
        "#!/bin/bash\nmpiexec -n 2 -ppn 2 -genv FI_PROVIDER tcp apptainer exec box sh -c"
        " \". '$HOME/env'; export A=\\$B; python t.py\"\n"
    )
    assert carried.run["args"][-1] == ". '${HOME}/env'; export A=$B; exec python t.py"
    assert carried.run["env"] == {"FI_PROVIDER": "tcp"}


def test_a_variable_of_a_job_of_slurm_is_not_to_be_set() -> None:
    notes = taken("#!/bin/bash\n#SBATCH -N 1\nsrun python t.py $SLURM_JOB_ID\n").notes()
    assert "before you submit: replace ${SLURM_JOB_ID}, which only a job of Slurm has" in notes
    assert not any("to set before" in one for one in notes)


def test_variables_of_pbs_say_the_scheduler() -> None:
    carried = taken("#!/bin/bash\ncd $PBS_O_WORKDIR\ntorchrun --nproc_per_node=2 t.py\n")
    assert any("ndctl cannot submit to PBS" in one for one in carried.before)


@pytest.mark.parametrize(
    ("word", "arg"),
    [
        ("a='${B}'", "a=$${B}"),
        ("'${B:-1} ${B?x}'", "$${B:-1} $${B?x}"),
        ('"a\\${B}"', "a$${B}"),
        ("a=\\${B}", "a=$${B}"),
        ("'$B'", "$B"),
        ("'${model.name} ${now:%Y}'", "${model.name} ${now:%Y}"),
        ("'a'\"${B}\"", "a${B}"),
    ],
)
def test_a_literal_is_no_variable_of_the_spec(word: str, arg: str) -> None:
    assert taken(f"torchrun t.py {word}\n").run["args"] == [arg]
    assert taken(f"X={word}\nexport X\ntorchrun t.py $X\n").run["env"]["X"] == arg


@pytest.mark.parametrize(
    ("line", "args"),
    [
        ("""bash -c "torchrun t.py '$B' '\\${B}' \\${A} $A" """, ["${B}", "$${B}", "1", "1"]),
        ("""bash -c 'torchrun t.py ${B} "${A}"'""", ["${B}", "1"]),
        ("""bash -c "torchrun t.py \\"\\$P\\"" """, ["/d/e"]),
    ],
)
def test_a_shell_inside_reads_what_the_first_one_kept(line: str, args: list[str]) -> None:
    assert taken(f"A=1\nP=/d/e\nsrun {line}\n").run["args"] == args
    assert taken("eval \"torchrun t.py '\\${B}' '$B'\"\n").run["args"] == ["$${B}", "${B}"]


def test_sums_with_brackets_of_their_own_are_computed() -> None:
    carried = taken(
        "#!/bin/bash\nP=512 R=1024\n"
        "torchrun --nproc_per_node=2 t.py --a $(((P + R) * 3)) --b $(((P + R)))"
        " --c $((P*(R-(P-1)))) --d $(((P + UNKNOWN))) --e $((P / 2))x$((R % 1000))"
        " --f $(echo $((P + 1)))\n"
    )
    assert carried.run["args"] == [
        *("--a", "4608", "--b", "1536", "--c", "262656", "--d", "$(((P + UNKNOWN)))"),
        *("--e", "256x24", "--f", "$(echo 513)"),
    ]
