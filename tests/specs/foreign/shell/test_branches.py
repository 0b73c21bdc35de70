"""Branches of scripts: conditions of several parts, `&&` and `||`, and arguments of the script."""

import pytest

from orchestrator.specs.foreign.batch_script import from_script
from orchestrator.specs.foreign.carried import Carried
from orchestrator.specs.foreign.shell.branches import holds
from orchestrator.specs.foreign.shell.words import commands_in


def taken(text: str) -> Carried:
    return from_script(f"#!/bin/bash\n{text}", "script")


@pytest.mark.parametrize(
    ("test", "result"),
    [
        ('[[ "$KIND" == "big" ]]', True),
        ('[[ "$KIND" == "big" && -z "$NOTHING" ]]', True),
        ('[[ "$KIND" == "big" && -n "$NOTHING" ]]', False),
        ('[[ -n "$NOTHING" || $COUNT -gt 3 ]]', True),
        ("[[ $NOTHING -eq 0 ]]", True),
        ("[ $NOTHING -eq 0 ]", None),
        ("[ ! -z $KIND ]", True),
        ("[ -f some.txt ]", None),
        ('[[ "$KIND" == b* ]]', None),
        ('[[ "$KIND" =~ ^(big|small)$ ]]', None),
    ],
)
def test_a_condition_holds(test: str, result: bool | None) -> None:
    (command,) = commands_in(test)
    assert holds(list(command.words), {"KIND": "big", "COUNT": "4"}) is result


@pytest.mark.parametrize(
    ("condition", "entered"),
    [
        ('[[ "$A" == "1" ]] && [[ "$B" == "2" ]]', True),
        ('[[ "$A" == "1" ]] && [[ "$B" == "3" ]]', False),
        ('[[ "$A" == "7" ]] || [[ "$B" == "2" ]]', True),
        ('[[ "$A" == "7" ]] || [[ "$B" == "3" ]]', False),
        ('[[ "$A" == "1" &&\n "$B" == "2" ]]', True),
    ],
)
def test_each_part_of_a_condition_counts(condition: str, entered: bool) -> None:
    carried = taken(
        f"A=1\nB=2\nif {condition}; then\n  LR=0.1\nelse\n  LR=0.2\nfi\ntorchrun a.py --lr $LR\n"
    )
    assert carried.run["args"] == ["--lr", "0.1" if entered else "0.2"]
    assert carried.left == []


def test_a_command_behind_a_test_runs_only_if_the_test_holds() -> None:
    carried = taken(
        'SIZE=7\nARGS="--size $SIZE"\n'
        '[[ -n "$RESUME" ]] && ARGS+=" --resume $RESUME"\n'
        '[ $SIZE -eq 7 ] && ARGS+=" --small"\n'
        '[ $SIZE -eq 7 ] || ARGS+=" --large"\n'
        "[ -f notes.txt ] && source env.sh\n"
        "torchrun --nproc_per_node=2 a.py $ARGS\n"
    )
    assert carried.run["args"] == ["--size", "7", "--small"]
    # Whether the file is there, only a shell knows. The line may be needed.
    assert "type in the shell that submits: source env.sh" in carried.before


def test_an_empty_variable_that_an_argument_sets_stays_a_variable() -> None:
    carried = taken(
        'TASK=""\nLR=0.1\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n'
        '    --task)\n      TASK="$2"\n      shift 2 ;;\n'
        "    --lr)\n      LR=$2\n      shift 2 ;;\n  esac\ndone\n"
        "torchrun --nproc_per_node=2 src/$TASK.py --lr $LR\n"
    )
    assert carried.run["script"] == "src/${TASK}.py"
    assert carried.run["args"] == ["--lr", "0.1"]
    assert carried.notes() == ["to set before you submit, or to replace here: TASK"]


@pytest.mark.parametrize("part", ["a && ", "a || ", "! ", "( "])
def test_a_condition_without_end_is_read(part: str) -> None:
    carried = taken(f"if [[ {part * 5_000} a ]]; then\n  x\nfi\ntorchrun a.py\n")
    assert carried.run["script"] == "a.py"


CASE = """
case "$KIND" in
  tiny | small) LAYERS=2 ;;
  b*) LAYERS=24; (cd data; ls)
      if [ $LAYERS -eq 24 ]; then HEADS=16; fi ;;
  *) LAYERS=0 ;;
esac
torchrun a.py $LAYERS $HEADS --end
"""


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("small", ["2", "${HEADS}", "--end"]),
        ("big", ["24", "16", "--end"]),
        ("other", ["0", "${HEADS}", "--end"]),
        ("$1", ["${LAYERS}", "${HEADS}", "--end"]),
        ("$(hostname)", ["${LAYERS}", "${HEADS}", "--end"]),
    ],
)
def test_the_branch_of_a_case_is_entered_if_its_word_is_known(kind: str, args: list[str]) -> None:
    assert taken(f"KIND={kind}\n{CASE}").run["args"] == args


def test_behind_a_pattern_that_only_a_shell_knows_no_branch_is_entered() -> None:
    carried = from_script(
        "K=a\nL=0\ncase $K in $(kind)) L=1 ;; a) L=2 ;; *) L=3 ;; esac\npython train.py --l $L\n",
        "script",
    )
    assert carried.run["args"] == ["--l", "0"]


def test_a_case_in_one_line_and_inside_of_another() -> None:
    carried = taken(
        "A=x\nB=2\ncase $A in y) C=1;; x) case $B in 1) C=2;; 2) C=3;; esac; D=4;; esac\n"
        "torchrun a.py $C $D\n"
    )
    assert carried.run["args"] == ["3", "4"]


def test_sums_may_be_large_and_behind_let() -> None:
    carried = taken("T=300\nlet N=$((T*1000000000))\nlet 'M = 2'\ntorchrun a.py $N\n")
    assert carried.run["args"] == ["300000000000"]


def test_branches_may_begin_behind_a_word_of_the_shell() -> None:
    carried = taken(
        'A=5\nif [ "$A" = 5 ]; then if [ "$A" = 6 ]; then B=1; else B=2; fi\n'
        "else if true; then B=9; fi; fi\n"
        "while [ $# -gt 0 ]; do case $1 in --x) X=$2; shift;; *) exit 1;; esac; done\n"
        "torchrun a.py $B $X\n"
    )
    assert (carried.run["args"], carried.left) == (["2", "${X}"], [])
