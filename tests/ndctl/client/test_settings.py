"""Bad input: each call says all that is wrong, and starts nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndctl
from ndctl.client.settings import overrides_of
from tests.ndctl.client.programs import work, write_script

OWN = {"name": "own", "run": {"program": "true"}, "cluster": {"gpus_per_host": 1}}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NDCTL_RUN_ROOT", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_values_of_set_are_written_as_they_are() -> None:
    values = {"a": 1, "b": "100", "c": True, "d": None, "e": [1.5, "x"], "f": {"g": "é\n:"}}
    assert overrides_of(values, "slurm") == (
        *("a=1", 'b="100"', "c=true", "d=null", 'e=[1.5, "x"]', 'f={"g": "é\\n:"}'),
        'cluster.backend="slurm"',
    )
    assert overrides_of({"n": np.int64(3), "x": np.float32(0.5), "p": Path("/a")}, None) == (
        *("n=3", "x=0.5", 'p="/a"'),
    )


def test_all_values_of_set_that_no_spec_can_hold_are_named() -> None:
    wrong: dict[Any, Any] = {"run.args": {1, 2}, 7: 1, "a=b": 2, "cluster.hosts": object()}
    with pytest.raises(ndctl.SpecError) as refused:
        ndctl.submit(OWN, set=wrong)
    for words in ("run.args: {1, 2} is a set", "7: must be", "'a=b': must be", "cluster.hosts"):
        assert words in refused.value.message
    assert refused.value.fix


def test_all_mistakes_of_a_mapping_are_told_at_once(root: Path) -> None:
    spec = {"nme": "x", "run": {"program": "true"}, "cluster": {"gpus_per_host": "2"}}
    for call in (ndctl.submit, ndctl.plan):
        with pytest.raises(ndctl.SpecError) as refused:
            call(spec, set={"resilience.max_restarts": -1})
        said = str(refused.value)
        assert "did you mean name?" in said
        assert "spec: cluster.gpus_per_host: must be a whole number" in said
        assert "--set resilience.max_restarts: must be" in said
    assert not root.exists()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ndctl.submit("missing.yaml"), "missing.yaml: no such file"),
        (lambda: ndctl.submit(3), "the spec is 3"),  # type: ignore[arg-type]
        (lambda: ndctl.run("train.py --lr 1"), "the program is 'train.py --lr 1'"),
        (lambda: ndctl.run([]), r"the program is \[\]"),
        (lambda: ndctl.run(["missing.py"]), "missing.py"),
        (lambda: ndctl.run(["--no-python", "true"], gpus_per_host=0), "at least 1"),
        (lambda: ndctl.submit(OWN, drills=["kil:rank=0@step=1", "stop"]), "(?s)kil.*stop"),
        (lambda: ndctl.submit(OWN, drills="kill:rank=1@step=2"), "drills is 'kill:rank=1@step=2'"),
        (lambda: ndctl.submit(OWN, set=["a=b"]), r"set is \['a=b'\]"),  # type: ignore[arg-type]
        (lambda: ndctl.job(None), "the job is None"),  # type: ignore[arg-type]
        (lambda: ndctl.submit(OWN, resume=True, new=True), "resume and new exclude each other"),
        (lambda: ndctl.submit(OWN, inventory="hosts.yaml"), "the backend is local"),
        (lambda: ndctl.submit(OWN, backend="slrum"), "cluster.backend"),
        (lambda: ndctl.submit(OWN, resume=True), "own"),
    ],
)
def test_a_bad_call_is_an_error_with_a_fix_and_starts_nothing(
    call: Callable[[], object], words: str, root: Path
) -> None:
    with pytest.raises(ndctl.Error, match=words) as refused:
        call()
    assert refused.value.fix or "fix: " in str(refused.value)
    assert ndctl.jobs() == []


def test_a_timeout_is_not_negative(tmp_path: Path) -> None:
    job = ndctl.run(work(tmp_path, 0), gpus_per_host=1)
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match="give seconds, at least 0, or None"):
            job.wait(timeout=timeout)
    assert job.wait().ended


def test_a_file_that_may_not_be_read_is_an_error_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.cli.test_verbs import another_user

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    write_script(folder, "")
    with another_user(folder), pytest.raises(ndctl.Error, match="private") as refused:
        ndctl.submit(folder / "spec.yaml")
    assert refused.value.fix
