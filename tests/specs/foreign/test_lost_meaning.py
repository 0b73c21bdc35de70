"""What a script says is in the spec or in a note, and nothing else is in the spec."""

from typing import Any

import pytest

from orchestrator.specs.foreign.batch_script import from_script
from orchestrator.specs.foreign.carried import Carried

HEAD = "#!/bin/bash\n#SBATCH -N 2 --gpus-per-node=4\n"
TRAINING = "srun torchrun --nnodes 2 --nproc_per_node 4 train.py"


def taken(text: str) -> Carried:
    return from_script(f"{HEAD}{text}\n", "job")


def run_of(text: str) -> Any:
    return taken(text).run


@pytest.mark.parametrize(
    "loop", [f"until {TRAINING}", f"while ! {TRAINING}", f"for i in 1 2; do {TRAINING} && break"]
)
def test_a_loop_that_tries_again_is_said(loop: str) -> None:
    do = "" if loop.startswith("for") else "do"
    carried = taken(f"{loop}; {do} sleep 9; done\nsrun -N1 python eval.py")
    assert carried.run == {"script": "train.py", "args": []}
    assert carried.left[0].startswith(f"line 3: the loop `{loop[:5].split()[0]} ")
    assert "up to resilience.max_restarts times" in carried.left[0]
    assert carried.left[1] == "line 4: srun -N1 python eval.py"


def test_a_loop_that_waits_for_a_command_starts_no_training() -> None:
    carried = taken(f"while [ $n -lt 5 ]; do sleep 1; done\nuntil ping h; do :; done\n{TRAINING}")
    assert (carried.run["script"], carried.left) == ("train.py", [])


@pytest.mark.parametrize(
    ("line", "own"),
    [
        ("srun /v/bin/torchrun --nproc_per_node 4 t.py", "/v/bin/torchrun"),
        ("T=./pt/bin/torchrun\nsrun $T t.py", "./pt/bin/torchrun"),
        ("srun ~/env/bin/python3 -u t.py", "${HOME}/env/bin/python3"),
        ("srun /usr/bin/python3 t.py --python /a/python", None),
        ("srun python t.py", None),
    ],
)
def test_an_interpreter_in_a_folder_of_its_own_is_said(line: str, own: str | None) -> None:
    said = [one for one in taken(line).before if one.startswith("install ndctl")]
    expected = (
        f"install ndctl in the environment of {own}, and submit from it: ranks run with the"
        " interpreter of `ndctl submit`"
    )
    assert said == ([] if own is None else [expected])


def test_an_interpreter_in_a_container_is_the_one_of_the_spec() -> None:
    carried = taken("srun --container-image a.sqsh /v/bin/python t.py")
    assert carried.cluster["slurm"]["container"]["python"] == "/v/bin/python"
    carried = taken("srun --container-image a.sqsh /v/bin/torchrun t.py")
    assert "set cluster.slurm.container.python to the one of /v/bin/torchrun" in carried.before
    for program in ("/v/bin/python", "/v/bin/torchrun"):
        args = run_of(f"srun singularity exec a.sif {program} t.py")["args"]
        assert args == ["exec", "a.sif", "/v/bin/python", "t.py"]


@pytest.mark.parametrize(
    ("lines", "workdir"),
    [
        ("#SBATCH --chdir=/a\n", "/a"),
        ("#SBATCH --chdir=/a\ncd $SLURM_SUBMIT_DIR\n", None),
        ("#SBATCH --chdir=/a\ncd b\ncd c\n", "/a/b/c"),
        ("#SBATCH --chdir=/a\ncd /b\n", "/b"),
        ("#SBATCH --chdir=/a\ncd $PWD/b\n", "/a/b"),
        ("cd /a; cd b; cd -\n", "/a"),
        ("pushd /a; make; popd\n", None),
        ("(cd data; python prepare.py)\n", None),
        ("(cd a; (cd b); ", "a"),
        ("f() { cd /a; }; f\n", "/a"),
    ],
)
def test_the_program_starts_in_the_folder_of_the_script(lines: str, workdir: str | None) -> None:
    run = run_of(f"{lines}{TRAINING}{')' if lines.startswith('(cd a') else ''}\ncd /results")
    assert run.get("workdir") == workdir


def test_pwd_follows_cd() -> None:
    text = (
        f"#SBATCH --chdir=/a\nexport A=$PWD\ncd b\nexport B=$(pwd) C=$SLURM_SUBMIT_DIR\n{TRAINING}"
    )
    assert run_of(text)["env"] == {"A": "/a", "B": "/a/b", "C": "${PWD}"}
    assert run_of(f"cd b\nexport B=$PWD\n{TRAINING}")["env"] == {"B": "${PWD}/b"}


@pytest.mark.parametrize(
    ("lines", "env"),
    [
        ("CUDA_VISIBLE_DEVICES=0 python prepare.py\n", None),
        ("export A=1\nA=2 python prepare.py\n", {"A": "1"}),
        ("(export A=1; python prepare.py)\n", None),
        ("A=1 srun bash -c 'torchrun train.py'\n", {"A": "1"}),
        ("export A=1\nsrun torchrun --nnodes 2 train.py\nexport A=2\n", {"A": "1"}),
    ],
)
def test_the_program_has_the_variables_of_its_line(lines: str, env: Any) -> None:
    text = lines if "train.py" in lines else f"{lines}{TRAINING}"
    assert run_of(text).get("env") == env


@pytest.mark.parametrize("word", ['"$@"', "$*", "${@:2}"])
def test_arguments_of_the_script_are_asked_for(word: str) -> None:
    carried = taken(f"{TRAINING} --a {word}")
    assert carried.run["args"] == ["--a"]
    assert any(one.startswith("add to run.args what you type behind") for one in carried.before)
    asked = taken(f"{TRAINING} --a={word}").before
    name = word.strip('"')
    assert f"replace {name} in run, which are arguments of the script" in asked


def test_functions_and_shells_have_arguments_of_their_own() -> None:
    carried = taken(f'go() {{ local n=$1; shift; {TRAINING} --n $n "$@"; }}\ngo 2 --lr 1')
    assert (carried.run["args"], carried.before) == (["--n", "2", "--lr", "1"], [])
    carried = taken("srun bash -c 'torchrun train.py \"$@\" $1' -- --lr 1 'a b'")
    assert carried.run["args"] == ["--lr", "1", "a b", "--lr"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f'{TRAINING} <<< "yes"', 'line 3: <<< "yes": ranks have no standard input'),
        (f"{TRAINING} < answers.txt", "line 3: < answers.txt: ranks have no standard input"),
        (f"{TRAINING} <<EOF\nyes\nEOF", "line 3: <<EOF: ranks have no standard input"),
        (f"cat a | {TRAINING}", "line 3: | before it: ranks have no standard input"),
        (f"python - <<'EOF'\nimport a\nEOF\n{TRAINING}", "line 3: python - <<'EOF'"),
        (f"python - > h <<'EOF'\nimport a\nEOF\n{TRAINING}", "line 3: python - > h <<'EOF'"),
        (f"tee a.json <<EOF\n1\nEOF\n{TRAINING}", "line 3: tee a.json <<EOF"),
    ],
)
def test_what_a_program_reads_is_said(line: str, said: str) -> None:
    carried = taken(line)
    assert carried.run == {"script": "train.py", "args": []}
    assert carried.left[0] == said


def test_no_input_is_no_loss() -> None:
    assert taken(f"{TRAINING} < /dev/null").left == []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('if [ -f c ]; then R="--resume c"; else R=""; fi', 'line 3: R="--resume c"'),
        ("if [ -f c ]; then R+=(--resume); fi", "line 3: R+=(--resume)"),
        ("case $WHERE in a) R=1;; esac", "line 3: R=1"),
        ("if [ -f c ]; then source c; fi", "line 3: source c"),
        ("if [ -f c ]; then export C=1; fi", "line 3: export C=1"),
        ("if [ -f c ]; then OTHER=1; echo a; fi", None),
        ("A=1; if [ $A = 2 ]; then R=1; fi", None),
    ],
)
def test_a_branch_that_only_a_shell_enters_is_said(lines: str, said: str | None) -> None:
    left = taken(f"{lines}\n{TRAINING} $R").left[:1]
    assert left == ([] if said is None else [f"{said} (only a shell knows whether it runs)"])


def test_a_program_in_such_a_branch_is_named() -> None:
    carried = taken(f"if srun nvidia-smi; then\n{TRAINING}\nfi")
    assert "set run: no program was found that runs on each rank" in carried.before
    assert carried.left[0].startswith("line 4: srun torchrun")


def test_ssh_starts_the_program_of_its_line() -> None:
    carried = taken('for h in a b; do ssh $h "cd /c && torchrun --nproc_per_node 4 t.py" & done')
    assert carried.run == {"script": "t.py", "args": [], "workdir": "/c"}


def test_a_file_of_a_shell_alone_stays_one_word() -> None:
    carried = taken(f"source <(cat env.sh)\n{TRAINING} --f <(cat x)")
    assert carried.cluster["slurm"]["setup"] == ["source <(cat env.sh)"]
    assert carried.run["args"] == ["--f", "<(cat x)"]
    assert "replace <(cat x) in run, which only the script's shell knows" in carried.before
