"""Check before submission that data, tokenizer and weights of a spec exist.

The trainer checks the same, but only after the job waited in the queue and holds all its hosts. The
checks follow the rules of the trainer without importing torch and transformers, so that `ndctl
validate` stays fast. `resume_check.py` checks the checkpoint of a job that resumes.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.check_results import Finding
from orchestrator.contract.codec import Problem
from orchestrator.contract.files.data_files import Found, UnusableFiles, find
from orchestrator.contract.spec.data_spec import DataSpec
from orchestrator.contract.spec.job_spec import CommonSpec, JobSpec
from orchestrator.errors import JobError
from orchestrator.load import Written
from orchestrator.model_config import HUB_ID, cached_snapshots

MOST_FILES = 1000
"""Files of a glob that are listed. The check only needs to know that there are files of one format,
and listing millions of files on a shared file system takes minutes."""
BYTES = "bytes"
OF_A_TOKENIZER = re.compile(
    r"token|vocab|merges|spiece|sentencepiece|bpe|prophetnet|dict\.txt$|\.(model|spm)$"
)
"""Matches a file name of every tokenizer that transformers can load."""
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


class Looked(Struct, frozen=True, kw_only=True):
    problems: tuple[Problem, ...] = ()
    """Errors of the spec that the trainer would report."""
    unchecked: str = ""
    """Inputs that were not checked, or that may be created before the ranks start, and why."""
    refusal: JobError | None = None
    """Why the job cannot resume with any spec."""
    doubts: tuple[str, ...] = ()
    """Warnings that do not stop the job."""
    resumes: str = ""
    """The checkpoint from which the job resumes; empty if it does not resume."""

    def __or__(self, other: "Looked") -> Self:
        """Both results together."""
        return replace(
            self,
            problems=(*self.problems, *other.problems),
            unchecked="; ".join(filter(None, (self.unchecked, other.unchecked))),
            refusal=self.refusal or other.refusal,
            doubts=(*self.doubts, *other.doubts),
            resumes=self.resumes or other.resumes,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user at submission."""
        return (*self.doubts, *filter(None, (self.unchecked,)))


def look(spec: JobSpec, hub: Path, *, other_hosts: bool = False) -> Looked:
    """Check all files and folders that `spec` names.

    Args:
        hub: the local Hugging Face cache.
        other_hosts: the hosts are described, and may see other files than this machine.
    """
    if elsewhere := sees_other_files(spec, other_hosts):
        named = tuple(_named(spec))
        return Looked(unchecked=f"{_listed(named)} not checked: {elsewhere}" if named else "")
    problems = tuple(_problems(spec, hub))
    if problems and spec.cluster.backend == "slurm" and spec.cluster.slurm.setup:
        # The setup commands run on the hosts before the ranks and may download the files.
        missing = _listed([problem.path for problem in problems])
        why = "cluster.slurm.setup has to create what is missing"
        return Looked(unchecked=f"{missing} not found on this machine: {why}")
    return Looked(problems=problems)


def findings_of(looked: Looked, written: Written) -> tuple[Finding, ...]:
    """The result in the form of `ndctl doctor`."""
    found = [
        Finding(
            what=problem.path,
            verdict="stops",
            found=f"{written.document.place_of(problem.path)}: {problem.said}",
            fix=problem.fix,
        )
        for problem in looked.problems
    ]
    if looked.refusal is not None:
        said, fix = looked.refusal.message, looked.refusal.fix
        found.append(Finding(what="resume", verdict="stops", found=said, fix=fix))
    found += [Finding(what="resume", verdict="warns", found=doubt) for doubt in looked.doubts]
    if looked.resumes:
        found.append(Finding(what="resume", verdict="ok", found=looked.resumes))
    if looked.unchecked:
        found.append(Finding(what="inputs", verdict="note", found=looked.unchecked))
    elif not looked.problems:
        found.append(Finding(what="inputs", verdict="ok", found="all inputs of the spec exist"))
    return tuple(found)


def _named(spec: JobSpec) -> Iterator[str]:
    """Keys with paths that may exist only on the hosts of the job."""
    if not spec.data.files.startswith("{stdlib}"):
        yield "data.files"
    if spec.data.validation is not None and spec.data.validation.files is not None:
        yield "data.validation.files"
    if spec.data.tokenizer != BYTES:
        yield "data.tokenizer"
    if spec.model.weights is not None:
        yield "model.weights"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return f"{', '.join(names)} {'was' if len(names) == 1 else 'were'}"


def sees_other_files(spec: CommonSpec, other_hosts: bool) -> str:
    """Why this machine does not see the files of the ranks; empty if it does."""
    if spec.cluster.backend == "kubernetes":
        return "pods see the files of their image and volumes"
    if spec.cluster.backend == "slurm" and spec.cluster.slurm.container is not None:
        return "ranks see the files of their container"
    return "the hosts are from an inventory file or cluster.gpu" if other_hosts else ""


def _problems(spec: JobSpec, hub: Path) -> Iterator[Problem]:
    yield from _data(spec.data)
    if spec.data.tokenizer != BYTES:
        yield from _tokenizer(spec.data.tokenizer, hub)
    if spec.model.weights is not None:
        yield from _weights(spec.model.weights, hub)


# Data


def _data(data: DataSpec) -> Iterator[Problem]:
    held_out = data.validation.files if data.validation else None
    train = _files("data.files", data.files, data)
    validation = _files("data.validation.files", held_out, data) if held_out else None
    yield from (one for one in (train, validation) if isinstance(one, Problem))
    if isinstance(train, Found) and isinstance(validation, Found):
        yield from _both(train, validation, held_out)


def _files(key: str, pattern: str, data: DataSpec) -> Found | Problem:
    try:
        return find(pattern, data.format, MOST_FILES)
    except UnusableFiles as exc:
        limit = f"a glob of data files (this one {exc.said})"
        return Problem(path=key, value=pattern, limit=limit, fix=exc.fix)


def _both(train: Found, validation: Found, held_out: str | None) -> Iterator[Problem]:
    key = "data.validation.files"
    if validation.format != train.format:
        limit = f"a glob of {train.format} files like data.files (it matches {validation.format})"
        fix = "use validation files of the same format"
        yield Problem(path=key, value=held_out, limit=limit, fix=fix)
    elif len(train.files) < MOST_FILES and not train.without(validation).files:
        limit = "a glob that leaves files of data.files for training"
        fix = "use fewer validation files, or set data.validation.fraction instead"
        yield Problem(path=key, value=held_out, limit=limit, fix=fix)


# Hugging Face folders


def _tokenizer(name: str, hub: Path) -> Iterator[Problem]:
    folder = _folder(name, hub)
    if folder is not None and any(map(OF_A_TOKENIZER.search, _names(folder))):
        return
    what = "bytes, a folder with the files of a tokenizer, or a hub id in the local cache"
    rest = '--include "*.json" --include "*.model" --include "*.txt"'
    yield _absent("data.tokenizer", name, hub, (what, "the files of a tokenizer", rest))


def _weights(name: str, hub: Path) -> Iterator[Problem]:
    folder = _folder(name, hub)
    if folder is not None and any((folder / file).exists() for file in WEIGHTS):
        return
    what = "a folder with safetensors, or a hub id in the local cache"
    rest = '--include "*.safetensors*"'
    yield _absent("model.weights", name, hub, (what, " or ".join(WEIGHTS), rest))


def _folder(name: str, hub: Path) -> Path | None:
    """Where transformers finds `name`: a folder first, then revision `main` in the cache. The ranks
    never download."""
    if Path(name).is_dir():
        return Path(name)
    return next(iter(cached_snapshots(name, hub, main_alone=True)), None)


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:  # ranks cannot list the folder either
        return []


def _absent(key: str, name: str, hub: Path, words: tuple[str, str, str]) -> Problem:
    """The problem of a missing input. `words`: the limit, the files, options of `hf download`."""
    what, files, rest = words
    if Path(name).is_dir():
        return Problem(path=key, value=name, limit=what, fix=f"add {files} to the folder")
    if not HUB_ID.fullmatch(name):
        fix = "the folder does not exist; check the path"
        return Problem(path=key, value=name, limit=what, fix=fix)
    limit = f"{what} (ranks do not download, and it is not in {hub})"
    return Problem(path=key, value=name, limit=limit, fix=f"hf download {name} {rest}")
