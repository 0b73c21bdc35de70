"""Which files of a user's folder are copied, and how."""

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import aiohttp
import pytest

from orchestrator.backends.slurm.on_nodes import capture
from orchestrator.backends.slurm.on_nodes.capture import Chosen, choose, take
from orchestrator.backends.slurm.on_nodes.capture_rules import is_never_copied
from orchestrator.errors import Refused
from tests.agent.world import TurnedClock

ROOT = Path(__file__).parents[4]
PYTHON_GITIGNORE = """
# Byte-compiled / optimized / DLL files
__pycache__/
*.py[codz]
*$py.class
*.so
# Distribution / packaging
.Python
build/
lib/
!/lib/
*.egg-info/
.installed.cfg
MANIFEST
htmlcov/
.coverage.*
*.cover
docs/_build/
**/generated/*.md
celerybeat-schedule*
/site
\\#*
*.p[xy]*
!*.py
_web*/
!web_log.py
"""
"""Lines of the template for Python of github.com/github/gitignore, and some with `!` and `*`."""


def write(home: Path, *names: str) -> Path:
    for name in names:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    return home


def chosen(home: Path, run_root: Path = Path("/nowhere")) -> Chosen:
    return choose(home, run_root, TurnedClock())


def files_of_git(home: Path) -> set[str]:
    """What git would add: tracked and new files that nothing ignores."""
    argv = ["git", "-C", str(home), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    argv[1:1] = ["-c", "core.excludesFile=/dev/null"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    names = {*done.stdout.split("\0")} - {""}
    return {name for name in names if (home / name).exists()}


def may_be_copied(home: Path, name: str) -> bool:
    folders = [home / one for one in Path(name).parents if str(one) != "."]
    if any(is_never_copied(one, is_folder=True) for one in folders):
        return False
    return not is_never_copied(home / name, is_folder=False)


def in_copy(found: Chosen) -> set[str]:
    return {*found.files, *(link for link, _ in found.links)}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("inner", ["", "*.py\n", "!*.so\n/client*\n", "[a-h]*\n!*/\n!connector.py"])
def test_ignore_files_mean_what_they_mean_for_git(tmp_path: Path, inner: str) -> None:
    """On the files of an installed package, with an ignore file at the top and one below."""
    top, home = tmp_path / "top", tmp_path / "top" / "project"
    shutil.copytree(Path(aiohttp.__file__).parent, home / "aiohttp")
    write(home, "build/x.py", "lib/x.py", "aiohttp/lib/x.py", "docs/_build/x.html", "x y.py", "#a")
    write(home, "a/generated/b.md", "a/generated/c/b.md", "site/x.py", "a/site/x.py", "é.py")
    (top / ".gitignore").write_text(PYTHON_GITIGNORE)
    (home / "aiohttp" / ".gitignore").write_text(inner)
    subprocess.run(["git", "init", "-q", str(top)], check=True, timeout=60)
    wanted = {name for name in files_of_git(home) if may_be_copied(home, name)}
    assert len(wanted) > 5
    assert in_copy(chosen(home)) == wanted


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout of this repository")
def test_this_repository_is_copied_as_git_sees_it() -> None:
    wanted = {name for name in files_of_git(ROOT) if may_be_copied(ROOT, name)}
    found = in_copy(chosen(ROOT))
    assert found == wanted
    assert "orchestrator/run_module.py" in found


@pytest.mark.parametrize(
    "name",
    [
        *(".env", ".env.local", "deploy/id_rsa", "id_ed25519.pub", "tls/server.KEY", "a.pem"),
        *(".ssh/config", ".aws/credentials", ".netrc", ".git/config", "sub/.git/HEAD"),
        *("model.pt", "out/last.ckpt", "w/model.safetensors", "s/__0_0.distcp", "core.4711"),
        *("pytorch_model.bin", "__pycache__/a.cpython-311.pyc", "node_modules/a/index.py"),
        *("venv/pyvenv.cfg", "venv/lib/a.py", "conda/conda-meta/history", "conda/a.py"),
        *("ndctl-runs/job/journal.jsonl", "ndctl-runs/job/capture-1/a.py", "runs/job/spec.yaml"),
    ],
)
def test_secrets_checkpoints_and_environments_are_never_copied(tmp_path: Path, name: str) -> None:
    home = write(tmp_path / "home", "train.py", name)
    write(home, *({"venv/lib/a.py": ["venv/pyvenv.cfg"]}.get(name, [])))
    write(home, *({"conda/a.py": ["conda/conda-meta/history"]}.get(name, [])))
    write(home, *(["ndctl-runs/job/journal.jsonl"] if "capture-1" in name else []))
    (home / ".ndctlignore").write_text("!*\n")
    assert in_copy(chosen(home, home / "runs")) == {"train.py", ".ndctlignore"}


def test_an_ignore_file_of_ndctl_replaces_those_of_git(tmp_path: Path) -> None:
    home = write(tmp_path, "train.py", "_version.py", "sub/a.py", "data/x.bin")
    (home / ".gitignore").write_text("_version.py\nsub\n")
    (home / "sub" / ".gitignore").write_text("*\n")
    assert chosen(home).ignored == ("_version.py", "sub/")
    assert chosen(home).ignored_code == ("_version.py",)
    (home / ".ndctlignore").write_text("/data/\n")
    found = chosen(home)
    assert {"_version.py", "sub/a.py", "train.py"} < {*found.files}
    assert found.ignored == ("data/",)


def test_links_stay_links_and_lead_where_they_led(tmp_path: Path) -> None:
    home = write(tmp_path / "home", "pkg/a.py", "train.py", "big/data.bin")
    outside = write(tmp_path / "outside", "data/x.bin", "shared.py", "keys/server.key")
    (home / ".gitignore").write_text("big/\n")
    (home / "alias").symlink_to(home / "pkg")
    (home / "pkg" / "up.py").symlink_to("../train.py")
    (home / "data").symlink_to(outside / "data")
    (home / "large").symlink_to("big")
    (home / "shared.py").symlink_to(outside / "shared.py")
    (home / "gone").symlink_to("nowhere")
    (home / "loop").symlink_to("loop")
    (home / "above").symlink_to("..")
    (home / "server.key").symlink_to(outside / "keys" / "server.key")
    os.mkfifo(home / "pipe")
    copy = tmp_path / "copy"
    take(chosen(home), copy)
    assert readlink(copy / "alias") == "pkg"
    assert (copy / "alias" / "a.py").read_text() == "pkg/a.py"
    assert readlink(copy / "pkg" / "up.py") == "../train.py"
    assert readlink(copy / "data") == str(outside / "data")
    assert readlink(copy / "large") == str(home / "big"), "what is not copied stays in its place"
    assert readlink(copy / "above") == str(tmp_path)
    assert not (copy / "shared.py").is_symlink(), "code is copied from wherever it is"
    assert {path.name for path in copy.iterdir()} == {
        *("alias", "pkg", "data", "large", "above", "shared.py", "train.py", ".gitignore")
    }


def readlink(path: Path) -> str:
    return str(path.readlink())


def test_a_program_stays_executable(tmp_path: Path) -> None:
    home = write(tmp_path / "home", "tool.sh", "train.py")
    (home / "tool.sh").chmod(0o750)
    before = os.umask(0o027)
    try:
        take(chosen(home), tmp_path / "copy")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / "copy" / name).stat().st_mode) for name in home_files(home)]
    assert modes == [0o750, 0o640]


def home_files(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir())


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        ("MOST_FILES", 30, "at least 31 files"),
        ("MOST_BYTES", 300, "and 0.0 MB to copy"),
        ("MOST_S", 2.0, "listed for 3 s"),
    ],
)
def test_a_folder_above_a_limit_is_refused_before_it_is_listed_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: float, words: str
) -> None:
    seconds = count()

    class OneSecondPerCall(TurnedClock):
        """A clock that advances by one second per call."""

        def monotonic(self) -> float:
            return float(next(seconds))

    monkeypatch.setattr(capture, limit, most)
    home = write(tmp_path, "a.py", *(f"data/{n:04}.txt" for n in range(200)))
    looked: list[str] = []
    walk = capture._walk

    def counted(folder: Path, run_root: Path) -> Iterator[tuple[capture.Kind, str]]:
        for kind, path in walk(folder, run_root):
            looked.append(path)
            yield kind, path

    monkeypatch.setattr(capture, "_walk", counted)
    clock = OneSecondPerCall() if limit == "MOST_S" else TurnedClock()
    with pytest.raises(Refused, match=words) as failed:
        choose(home, Path("/nowhere"), clock)
    assert "The largest so far: data (" in failed.value.message
    assert f"{home}/.ndctlignore" in failed.value.fix
    assert len(looked) < 50


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = write(tmp_path, "train.py", "other/private.txt")

    def denied(path: str, mode: int) -> bool:  # tests may run as root, who may read all
        return "private" not in str(path)

    monkeypatch.setattr(os, "access", denied)
    with pytest.raises(Refused, match=f"cannot copy {home}/other/private.txt: permission denied"):
        chosen(home)


def test_an_interrupted_copy_leaves_no_copy_and_a_later_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, copy = write(tmp_path / "home", "a.py", "b.py"), tmp_path / "copy"

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(capture, "_copy", full)
        with pytest.raises(OSError, match="No space left"):
            take(chosen(home), copy)
    assert not copy.exists()
    found = chosen(home)
    (home / "b.py").unlink()  # as a log of another job that is removed meanwhile
    take(found, copy)
    assert [path.name for path in copy.iterdir()] == ["a.py"]
    assert not list(tmp_path.glob("*.part"))
