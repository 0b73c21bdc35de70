"""What ndctl answers to commands and options of other tools.

The names are those of the other tools' documentation: Slurm's commands, kubectl's verbs, the
command lines of SkyPilot, torchx, torchrun and DeepSpeed.
"""

import re

import pytest
from click.testing import CliRunner

from orchestrator.cli import cli
from orchestrator.cli.usage.other_tools import COMMANDS, OPTIONS
from orchestrator.contract.files import exit_codes

MISTAKES = [
    ("squeue", "Did you mean `ndctl list`?"),
    ("scancel 12", "Did you mean `ndctl cancel JOB`?"),
    ("apply -f job.yaml", "Did you mean `ndctl submit SPEC`?"),
    ("get jobs", "Did you mean `ndctl list`?"),
    ("help", "Did you mean `ndctl --help`?"),
    ("dashbord", "Did you mean 'dashboard'?"),
    ("submit job.yaml --nodes=4", "Did you mean --set cluster.hosts=…?"),
    ("submit job.yaml --nproc-per-node 8", "Did you mean --set cluster.gpus_per_host=…?"),
    ("submit job.yaml --partition gpu", "Did you mean --set cluster.slurm.partition=…?"),
    ("submit job.yaml --wait", "Did you mean --follow, or `ndctl wait JOB`?"),
    ("submit job.yaml --folow", "--follow"),
    ("run --num_gpus 8 -- train.py", "Did you mean --gpus-per-host?"),
    ("run --nnodes 2 -- train.py", "Did you mean --hosts?"),
    ("run --env A=1 -- train.py", "Did you mean --set run.env.NAME=VALUE?"),
    ("run --lr 3e-4 train.py", "Options of a program follow its name"),
    ("logs job --previous", "Did you mean --attempt N?"),
    ("logs job -c main", "Did you mean --host HOST or --rank N?"),
]


@pytest.mark.parametrize(("typed", "words"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_a_name_of_another_tool_gives_what_to_type(typed: str, words: str) -> None:
    done = CliRunner().invoke(cli, typed.split())
    assert done.exit_code == exit_codes.USAGE
    assert words in " ".join(done.output.split())


def test_what_is_named_exists() -> None:
    for name, typed in COMMANDS.items():
        assert name not in cli.commands, name
        command = typed.split()[0]
        assert command.startswith("--") or command in cli.commands, typed
        options = {text for one in cli.commands.get(command, cli).params for text in one.opts}
        assert {*re.findall(r"--[a-z-]+", typed)} <= {*options, "--help", "--version"}, typed
    for command, known in OPTIONS.items():
        options = {text for one in cli.commands[command].params for text in one.opts}
        assert not options & known.keys()
