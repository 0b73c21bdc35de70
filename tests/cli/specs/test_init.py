"""`ndctl init` writes a spec that `ndctl validate` accepts."""

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from orchestrator.cli import cli
from orchestrator.errors import SpecError

H100 = str(Path(__file__).parents[3] / "examples" / "inventories" / "h100.yaml")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('step 1')\n")
    (tmp_path / "corpus.txt").write_text("some text " * 1000)
    return tmp_path


def ndctl(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


@pytest.mark.parametrize("backend", ["local", "slurm", "kubernetes"])
@pytest.mark.parametrize(
    "what",
    [
        ("--train", "train.py", "--args", "--lr 3e-4 'two words'"),
        ("--train", "llama-tiny", "--data", "*.txt"),
    ],
)
def test_the_spec_is_valid(backend: str, what: tuple[str, ...]) -> None:
    done = ndctl("init", *what, "--backend", backend, "--hosts", "2", "--gpus-per-host", "2")
    assert done.exit_code == 0, done.output
    assert "ndctl validate job.yaml" in done.stdout
    hosts = () if backend == "local" else ("--inventory", H100)
    checked = ndctl("validate", "job.yaml", *hosts)
    assert checked.exit_code == 0, checked.exception
    assert "valid; 4 ranks" in checked.stdout
    text = Path("job.yaml").read_text()
    assert len([line for line in text.splitlines() if "#" in line]) > 4, "it has comments"


def test_arguments_are_split_as_by_a_shell() -> None:
    ndctl("init", "--train", "train.py", "--args", "--lr 3e-4 'two words' é")
    run = yaml.safe_load(Path("job.yaml").read_text())["run"]
    assert run == {"script": "train.py", "args": ["--lr", "3e-4", "two words", "é"]}


def test_a_model_of_hugging_face_gets_its_tokenizer() -> None:
    ndctl("init", "--train", "models/My Model_1.5B", "--data", "*.txt", "--backend", "kubernetes")
    spec = yaml.safe_load(Path("job.yaml").read_text())
    assert spec["model"] == {"path": "models/My Model_1.5B"}
    assert spec["data"]["tokenizer"] == "models/My Model_1.5B"
    assert spec["name"] == "my-model-1"


def test_a_file_that_exists_stays_without_force() -> None:
    Path("mine.yaml").write_text("mine")
    what = ("init", "mine.yaml", "--train", "train.py")
    done = ndctl(*what)
    assert isinstance(done.exception, SpecError)
    assert "--force" in done.exception.fix
    assert Path("mine.yaml").read_text() == "mine"
    assert ndctl(*what, "--force").exit_code == 0
    assert "script" in Path("mine.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --train WHAT"),
        (("--train", "llama-tiny"), "give --data GLOB"),
        (("--train", "train.py", "--data", "*.txt"), "a script gets --args"),
        (("--train", "llama-tiny", "--args", "x"), "a model gets --data"),
    ],
)
def test_without_a_terminal_it_names_the_options(words: tuple[str, ...], said: str) -> None:
    done = ndctl("init", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not Path("job.yaml").exists()


def test_a_wrong_name_writes_nothing() -> None:
    done = ndctl("init", "--train", "train.py", "--name", "my job!")
    assert isinstance(done.exception, SpecError)
    assert not Path("job.yaml").exists()


def test_on_a_terminal_it_asks_three_questions(folder: Path) -> None:
    above, below = pty.openpty()
    os.write(above, b"train.py\n--lr 1\nslurm 4by8\nslurm 4x8\n")
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "init"],
        stdin=below,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for fd in (above, below):
        os.close(fd)
    assert done.stdout.count("]: ") + done.stdout.count("script: ") == 4
    assert "4by8 is not like `slurm 4x8`" in done.stdout + done.stderr
    spec = yaml.safe_load(Path("job.yaml").read_text())
    assert spec["cluster"]["backend"] == "slurm"
    assert (spec["cluster"]["hosts"], spec["cluster"]["gpus_per_host"]) == (4, 8)
    assert spec["run"]["args"] == ["--lr", "1"]


def test_arguments_with_a_quote_that_does_not_end_are_refused_before_anything_is_written() -> None:
    done = ndctl("init", "--train", "train.py", "--args", "--name 'a b")
    assert done.exit_code == 2
    assert "Invalid value for '--args': --name 'a b has a quote that does not end" in done.output
    assert not Path("job.yaml").exists()


def test_a_folder_that_is_missing_is_an_error_with_a_fix() -> None:
    done = ndctl("init", "--train", "train.py", "missing/job.yaml")
    assert isinstance(done.exception, SpecError)
    assert done.exception.fix == "name a file in a folder of yours"


def test_ctrl_c_at_a_question_is_an_interruption_and_not_a_failed_job(folder: Path) -> None:
    above, below = pty.openpty()
    os.write(above, b"train.py\n")
    with subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "init"],
        stdin=below,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as asked:
        assert asked.stdout is not None
        assert asked.stderr is not None
        seen = ""
        while "Arguments" not in seen:
            seen += asked.stdout.read(1)
        # A signal right before the process begins to read is noticed only with the next one.
        while asked.poll() is None:
            asked.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                asked.wait(2)
        err = asked.stderr.read()
    for fd in (above, below):
        os.close(fd)
    assert (asked.returncode, err) == (130, "\ninterrupted\n")
    assert not Path("job.yaml").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nofile", "no such file"),
        ("train.py", "ndctl run -- train.py, or `ndctl init --train train.py`"),
        ("corpus.txt", "neither a script of a shell nor a manifest"),
        ("job.sh", "job.yaml exists"),
    ],
)
def test_a_source_that_is_wrong_is_said_before_the_file_that_exists(name: str, words: str) -> None:
    Path("job.yaml").write_text("name: mine\n")
    Path("job.sh").write_text("#!/bin/bash\nsrun python train.py\n")
    done = ndctl("init", "--from", name)
    assert isinstance(done.exception, SpecError)
    assert words in str(done.exception)
    assert Path("job.yaml").read_text() == "name: mine\n"


def test_a_dash_prints_the_spec_and_nothing_else() -> None:
    Path("job.sh").write_text("#!/bin/bash\n#SBATCH -N 2\nsrun --gpus-per-node=8 python train.py\n")
    for words in (("--from", "job.sh"), ("--train", "train.py")):
        done = ndctl("init", *words, "-")
        assert done.exit_code == 0, done.output
        assert yaml.safe_load(done.output)["run"]["script"] == "train.py"
        assert not Path("-").exists()
    Path("-").touch()
    assert ndctl("init", "--train", "train.py", "-").exit_code == 0, "it is no name of a file"
