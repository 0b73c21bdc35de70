"""What `$(dirname "$0")` and similar expressions become, compared with a real shell."""

import subprocess
import time
from pathlib import Path

import pytest

from orchestrator.specs.foreign.batch_script import from_script
from orchestrator.specs.foreign.shell.own_path import computed

PATH = "/home/me/project/scripts/run.sh"


def script_of(line: str, path: str = PATH) -> tuple[str, str | None]:
    """What `python $D/train.py` starts behind `line`, and in which folder."""
    text = f"#!/bin/bash\n{line}\ntorchrun --nproc_per_node=2 $D/train.py\n"
    run = from_script(text, "run", path).run
    return run["script"], run.get("workdir")


@pytest.mark.process
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
        '$(dirname $(dirname "$0/deeper"))',
    ],
)
def test_each_way_to_ask_for_the_folder_is_known(value: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f'D={value}\nprintf %s "$D"\n')
    folder = subprocess.check_output(["bash", str(script)], text=True)
    assert folder == str(tmp_path)
    assert script_of(f"D={value}", str(script)) == (f"{folder}/train.py", None)


def test_folders_above_it_are_computed_through_variables() -> None:
    lines = 'S=$(readlink -f "$0")\nHERE=$(dirname "$S")\nD=$(cd "$HERE/.." && pwd)'
    assert script_of(lines) == ("/home/me/project/train.py", None)
    assert script_of('cd "$(dirname "$0")/.."\nD=.') == ("./train.py", "/home/me/project")
    above = 'D=$(dirname "$(dirname "$(realpath "$0")")")'
    assert script_of(above) == ("/home/me/project/train.py", None)


@pytest.mark.process
@pytest.mark.parametrize(
    "text",
    [
        "$(basename /a/b.sh)",
        '$(basename -- "/a/b.sh" .sh)',
        "$(basename org/model)-x",
        "$(basename /a/.sh .sh)",
        "$(basename /a/b/)",
        "$(basename $(dirname /a/b/c))",
        "$(basename /)",
        "$(dirname /)",
        "$(dirname /a)",
        "$(dirname /a/b/)",
        "`dirname /a/b`/c",
        "$(realpath -m /a/../b/./c)",
        "$(cd /usr/../tmp && pwd)",
    ],
)
def test_what_is_computed_is_what_a_shell_says(text: str) -> None:
    assert computed(text) == subprocess.check_output(
        ["bash", "-c", f'printf %s "{text}"'], text=True
    )


@pytest.mark.parametrize("text", ["$(basename ${X})", "$(basename -a x y)", "$(dirname a/b)"])
def test_other_commands_stay(text: str) -> None:
    assert computed(text) == text


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
