"""Executes `manifests/image/Containerfile` without a container runtime: `python -m
tests.manifests.containerfile DIR`.

Copying and pip are real, in a virtual environment that replaces the image's Python and finds the
packages of this one. Nothing is downloaded. Commands that would change the machine are only
checked: Debian packages with `apt-get --simulate`. Users are not created.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "manifests" / "image" / "Containerfile"
INSTRUCTIONS = ("FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD")
PLAYED = ("apt-get", "rm", "groupadd", "useradd")
"""Commands that are recorded and not run."""


@dataclass(frozen=True)
class Step:
    what: str
    argument: str


def steps_of(text: str) -> list[Step]:
    """Raises ValueError for an instruction that is not known here."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", text))
    found = []
    for line in joined.splitlines():
        if line.strip():
            what, _, argument = line.strip().partition(" ")
            if what not in INSTRUCTIONS:
                raise ValueError(f"{what}: not one of {', '.join(INSTRUCTIONS)}")
            found.append(Step(what, " ".join(argument.split())))
    return found


@dataclass
class Image:
    """A folder that replaces the file system of an image."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    work: Path = Path("/")
    command: str = ""
    user: str = ""

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def python(self) -> Path:
        return self.folder / "python" / "bin" / "python"

    @property
    def played(self) -> list[str]:
        """Commands that the image would have run, each with its arguments."""
        log = self.folder / "played"
        return log.read_text().splitlines() if log.exists() else []

    def run(self, command: str, **more: str) -> str:
        """What a shell in the image prints. Raises CalledProcessError."""
        environ = {**self._own(), **self.environ, **more}
        done = subprocess.run(
            ["sh", "-ec", command],
            env=environ,
            cwd=self.root / self.work.relative_to("/"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout[-4000:]}")
        return done.stdout

    def _own(self) -> Mapping[str, str]:
        path = f"{self.folder}/played-bin:{self.python.parent}:/usr/bin:/bin"
        return {"PATH": path, "HOME": str(self.folder), "PIP_NO_INDEX": "1"}


def follow(folder: Path) -> Image:
    """Every step, in order."""
    image = Image(folder)
    image.root.mkdir(parents=True)
    _play(image)
    _make_python(image)
    for step in steps_of(CONTAINERFILE.read_text()):
        _step(image, step)
    return image


def _step(image: Image, step: Step) -> None:
    match step.what:
        case "ENV":
            image.environ |= dict(one.split("=", 1) for one in step.argument.split())
        case "WORKDIR":
            image.work = Path(step.argument)
            (image.root / image.work.relative_to("/")).mkdir(parents=True, exist_ok=True)
        case "COPY":
            *sources, target = step.argument.split()
            for source in sources:
                _copy(ROOT / source, image.root / image.work.relative_to("/") / target)
        case "RUN":
            image.run(step.argument)
        case "CMD":
            image.command = step.argument
        case "USER":
            image.user = step.argument


def _copy(source: Path, target: Path) -> None:
    """A file into a folder; of a folder what is in it, without what no context holds."""
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def _play(image: Image) -> None:
    own = image.folder / "played-bin"
    own.mkdir()
    for name in PLAYED:
        lines = ["#!/bin/sh", f'echo "{name} $*" >> {image.folder}/played']
        if name == "apt-get" and shutil.which("apt-get"):
            lines.append('[ "$1" = update ] || exec /usr/bin/apt-get --simulate "$@"')
        (own / name).write_text("\n".join(lines) + "\n")
        (own / name).chmod(0o755)


def _make_python(image: Image) -> None:
    """With the packages of this one behind its own, but for what is installed there for itself."""
    place = image.python.parents[1]
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=300
    )
    site = next(place.glob("lib/python*/site-packages"))
    (site / "packages-of-the-tests.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


if __name__ == "__main__":
    made = follow(Path(sys.argv[1]).absolute())
    sys.stdout.write("\n".join(made.played) + "\n" + made.run("ndctl --help"))
    sys.stdout.write(f"{made.user} {made.command} {os.path.relpath(made.folder)}\n")
