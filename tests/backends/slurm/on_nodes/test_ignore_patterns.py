"""git itself is asked what the patterns mean."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.backends.slurm.on_nodes.ignore_patterns import ignored, parse

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
FILES = ("a/b/ab", "a/b.py", "b/a/ab", "ab/a/b.py", "b.py", "a.b", " a", "#", "a*", "aa", "{a,b}")
FOLDERS = ("a", "a/b", "b", "b/a", "ab", "ab/a")
PIECES = ("a", "b", "*", "**", "?", "/", "/**/", "[ab]", "[!a]", "[^b-z]", "[[:alpha:]]", ".py")
MORE = ("\\*", "\\a", "[", "]", "#", "!", " ", "{a,b}", "[]a]", "[a\\]]", "+", "^", "$", "(")
patterns = st.lists(st.sampled_from((*PIECES, *MORE)), min_size=1, max_size=5).map("".join)
files = st.lists(st.tuples(st.sampled_from(("", "!", "/")), patterns), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=60)
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def of_git(repository: Path, lines: list[str], path: str) -> bool | None:
    (repository / ".gitignore").write_text("\n".join(lines))
    argv = ["git", "-C", str(repository), "-c", "core.excludesFile=/dev/null", "check-ignore"]
    done = subprocess.run(
        [*argv, "--no-index", "-v", "--non-matching", path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = re.match(r"(?:\.gitignore:\d+:(.*))?(?:::)?\t", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return None if found[1] is None else not found[1].startswith("!")


def of_ours(lines: list[str], path: str) -> bool | None:
    """For a folder that is ignored, git does not look at what is in it."""
    read, parts = parse(lines), path.split("/")
    for count in range(1, len(parts)):
        if ignored(read, "/".join(parts[:count]), is_folder=True):
            return True
    return ignored(read, path, is_folder=path in FOLDERS)


@given(lines=files, path=st.sampled_from((*FILES, *FOLDERS)))
@settings(max_examples=200, deadline=None)
def test_patterns_mean_what_git_says(
    repository: Path, lines: list[tuple[str, str]], path: str
) -> None:
    text = ["".join(line) for line in lines]
    assert bool(of_ours(text, path)) == bool(of_git(repository, text, path)), (text, path)
