"""Launchers and other programs before the program of a command line."""

import argparse
from collections.abc import Sequence

import pytest
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from orchestrator.specs.foreign.around_program import WITHOUT_VALUE, executable_of
from orchestrator.specs.foreign.batch_script import from_script
from orchestrator.specs.foreign.command_lines import program_of


@pytest.mark.parametrize(
    ("line", "key", "words"),
    [
        ("accelerate launch $(which) --steps=1", "script", "$(which) --steps=1"),
        ("accelerate launch --mixed_precision bf16 --multi_gpu $X", "script", "$X"),
        ("accelerate-launch --num_processes 2 tools/fit -a", "script", "tools/fit -a"),
        ("torchrun --nproc_per_node 2 --master_addr $A --master_port 1 $X b", "script", "$X b"),
        ("torchrun --rdzv_id abc --rdzv_backend c10d tools/fit", "script", "tools/fit"),
        ("torchrun --log_dir logs --no-python ./run.sh -- -a", "program", "./run.sh -a"),
        ("torchrun --standalone -- fit -- -a", "script", "fit -- -a"),
        ("torchrun --no_python python -u -c code", "program", "python -u -c code"),
        ("python -u -m torch.distributed.run --role a $X", "script", "$X"),
        ("deepspeed --hostfile h --no_ssh --launcher pdsh $X", "script", "$X"),
        ("srun -l --kill-on-bad-exit=1 -N 2 bash -c ./run -N 3", "program", "./run -N 3"),
        ("mpirun -np 2 --mca btl tcp -x A=1 -H a,b ./solver -n 2", "program", "./solver -n 2"),
        ("env -u A B=1 nohup srun ./solver", "program", "./solver"),
    ],
)
def test_a_value_of_a_launcher_is_no_program(line: str, key: str, words: str) -> None:
    found = executable_of(line.split())
    assert found is not None
    assert (found.key, " ".join([found.name, *found.args])) == (key, words)


@pytest.mark.parametrize(
    "line",
    ["srun", "srun -n", "torchrun --rdzv_id", "mpirun --mca a", "env -u", "torchrun -m"],
)
def test_a_line_that_ends_behind_an_option_has_no_program(line: str) -> None:
    # A manifest gives its words as a tuple.
    assert executable_of(tuple(line.split())) is None
    from_script(f"#!/bin/bash\n{line}\n", "job")


def _options(parser: argparse.ArgumentParser) -> dict[str, bool]:
    """The options of a parser, and whether each has a value."""
    return {
        option.replace("_", "-"): one.nargs != 0
        for one in parser._actions
        for option in one.option_strings
    }


def test_the_options_without_a_value_are_those_of_the_launchers() -> None:
    options = _options(get_args_parser()) | _options(launch_command_parser())
    assert len(options) > 100
    wrong = [one for one, valued in options.items() if bool(WITHOUT_VALUE.fullmatch(one)) is valued]
    assert wrong == []


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "pkg.m", "--", "-i", "x"),
        ("-m", "pkg.m", "-i", "--", "x"),
        ("t.py", "--", "a", "--", "b"),
        ("--", "t.py", "--", "a"),
        ("-m", "--", "pkg.m", "--", "b"),
    ],
)
def test_a_separator_is_dropped_where_torchrun_drops_it(words: Sequence[str]) -> None:
    found = program_of(["torchrun", *words]) or executable_of(["torchrun", *words])
    assert found is not None
    told = get_args_parser().parse_args([*words])
    assert (found.name, [*found.args]) == (told.training_script, told.training_script_args)


@pytest.mark.parametrize(
    ("line", "around"),
    [
        ("box_wrapper exec python t.py --a", ["box_wrapper exec"]),
        ("srun -N 2 mine --x 1 python -u -W ignore t.py --a", ["mine --x 1"]),
        ("xvfb-run -a python t.py --a", ["xvfb-run -a"]),
        ("coverage run t.py --a", ["coverage run"]),
        ("horovodrun -np 2 -H a:2 python t.py --a", ["horovodrun -np 2 -H a:2"]),
        ("numactl -N 0 stdbuf -oL python t.py --a", ["numactl -N 0 stdbuf -oL"]),
        ("srun ${BOX} python t.py --a", ["${BOX}"]),
        ("srun ${PYTHON} t.py --a", []),
        ("ft_launcher --nnodes 1:2 --ft-x 3 t.py --a", []),
        ("mpirun -np 2 --prefix /opt/mpi -x A -mca pml ob1 python t.py --a", []),
        ("env -u A B=1 nohup time -p bash -c 'torchrun t.py -- --a'", []),
        ("uv run --with numpy python t.py --a", []),
    ],
)
def test_programs_around_the_program_are_said(line: str, around: list[str]) -> None:
    carried = from_script(f"#!/bin/bash\n{line}\n", "a")
    assert carried.run["args"] == ["--a"]
    said = [one for one in carried.left if "around the program" in one]
    assert said == [
        f"line 2: {one} around the program: ndctl starts the program itself" for one in around
    ]


@pytest.mark.parametrize("run", ["conda run -n env", "micromamba run -n env", "poetry run"])
def test_a_program_in_an_environment_is_the_training_and_no_setup(run: str) -> None:
    for line in (f"{run} python t.py --a", f"srun {run} python t.py --a"):
        carried = from_script(f"#!/bin/bash\n#SBATCH -N 2\n{line}\n", "a")
        assert carried.run == {"script": "t.py", "args": ["--a"]}
        assert "setup" not in carried.cluster["slurm"]
        note = f"install ndctl in the environment of `{run}`, and type `{run} ndctl submit`"
        assert note in carried.before
