"""The folder of a script, which it finds with `$(dirname "$0")` and its like."""

import time

import pytest

from orchestrator.specs.foreign.batch_script import from_script
from orchestrator.specs.foreign.shell.own_path import computed

PATH = "/home/me/project/scripts/run.sh"


def script_of(line: str, path: str = PATH) -> tuple[str, str | None]:
    """What `python $D/train.py` starts behind `line`, and in which folder."""
    text = f"#!/bin/bash\n{line}\ntorchrun --nproc_per_node=2 $D/train.py\n"
    run = from_script(text, "run", path).run
    return run["script"], run.get("workdir")


@pytest.mark.parametrize(
    "value",
    [
        '$(dirname "$0")',
        "$(dirname $0)",
        "$( dirname -- ${0} )",
        "`dirname $0`",
        "${0%/*}",
        '"${BASH_SOURCE[0]%/*}"',
        '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        '"$( cd "$( dirname "${BASH_SOURCE[0]}" )" >/dev/null 2>&1 && pwd )"',
        '$(cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd -P)',
        '"$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)"',
        '$(dirname "$(realpath "$0")")',
        '$(dirname "$(readlink -f "${BASH_SOURCE[0]:-$0}")")',
        '$(realpath -s "$(dirname "$BASH_SOURCE")")',
        '$(dirname "$0/")',
        '$(dirname $(dirname "$0/deeper"))',
    ],
)
def test_each_way_to_ask_for_it_is_known(value: str) -> None:
    assert script_of(f"D={value}") == ("/home/me/project/scripts/train.py", None)


def test_folders_above_it_are_computed_through_variables() -> None:
    lines = 'S=$(readlink -f "$0")\nHERE=$(dirname "$S")\nD=$(cd "$HERE/.." && pwd)'
    assert script_of(lines) == ("/home/me/project/train.py", None)
    assert script_of('cd "$(dirname "$0")/.."\nD=.') == ("./train.py", "/home/me/project")
    above = 'D=$(dirname "$(dirname "$(realpath "$0")")")'
    assert script_of(above) == ("/home/me/project/train.py", None)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("$(basename /a/b.sh)", "b.sh"),
        ('$(basename -- "/a/b.sh" .sh)', "b"),
        ("$(basename org/model)-x", "model-x"),
        ("$(basename /a/.sh .sh)", ".sh"),
        ("$(basename /a/b/)", "b"),
        ("$(basename $(dirname /a/b/c))", "b"),
        ("$(basename ${X})", "$(basename ${X})"),
        ("$(dirname /)", "/"),
        ("$(basename /)", "/"),
        ("$(dirname /a)", "/"),
        ("$(basename -a x y)", "$(basename -a x y)"),
    ],
)
def test_names_are_computed_as_a_shell_does(text: str, name: str) -> None:
    assert computed(text) == name


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("D=$(dirname $0)", ""),  # read from somewhere else
        ("D=$(dirname $0)", "/home/me/my project/run.sh"),
        ("D=$(dirname $OTHER)", PATH),
        ("D=$(basename $OTHER)", PATH),
        ("D=$(dirname $00)", PATH),
        ("D=$(cd /data && ls)", PATH),
    ],
)
def test_what_is_not_known_stays(line: str, path: str) -> None:
    assert script_of(line, path)[0].startswith("$(")


def test_hostile_text_takes_no_time() -> None:
    begun = time.process_time()
    for part in (
        "$(dirname ",
        "$(cd /a >/dev/null ",
        "$(realpath -s ",
        "$(basename a ",
        "$(cd CDPATH=" + "/" * 50,
    ):
        computed(part * 5000)
    assert time.process_time() - begun < 2
