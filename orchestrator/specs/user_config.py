"""The user's own settings, `~/.config/ndctl/config.yaml`: below a spec, above what is built in."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct, structs

from orchestrator.contract.codec import Problem
from orchestrator.contract.files.env import user_config_file
from orchestrator.contract.spec.limits import AtLeast, Matches
from orchestrator.contract.spec.reporting.notify_spec import NotifySpec
from orchestrator.contract.spec.slurm_spec import Word
from orchestrator.errors import SpecError
from orchestrator.specs.variables import expand
from orchestrator.yaml_document import Document, decode_document, parse


class UserConfig(Struct, frozen=True, kw_only=True):
    """Each key is optional. What a spec or an option says wins."""

    run_root: (
        Annotated[str, Matches(r"[/~].*", "an absolute path, or one from ~/", "~/runs")] | None
    ) = None
    """Folder of the run directories."""
    partition: Word | tuple[Word, ...] | None = None
    """Partition of jobs on Slurm."""
    image: Annotated[str, Matches(r"\S+", "an image reference", "ghcr.io/you/ndctl:0.1")] | None = (
        None
    )
    """Image of jobs on Kubernetes."""
    notify: tuple[NotifySpec, ...] = ()
    """Who is told of incidents and of the end of your jobs."""
    price: Annotated[float, AtLeast(0)] | None = None
    """Price of a GPU for an hour, in any currency, if the inventory has none."""


class Settings(Struct, frozen=True, kw_only=True):
    config: UserConfig
    document: Document


IN_SPECS: Mapping[str, tuple[str, str | None]] = {
    "run_root": ("run_root", None),
    "partition": ("cluster.slurm.partition", "slurm"),
    "image": ("cluster.kubernetes.image", "kubernetes"),
    "notify": ("notify", None),
}
"""Key -> key of a spec, and the backend for which it counts."""


def settings_of(environ: Mapping[str, str]) -> Settings | None:
    """None if the user has no such file.

    Raises:
        SpecError: with all problems of the file, or the reason why it is not trusted.
    """
    path = user_config_file(environ)
    text = None if path is None else _trusted_text(path)
    if text is None:
        return None
    document = parse(text, str(path))
    if document.data is None:  # only comments
        document.data = {}
    if not isinstance(document.data, dict):
        problem = Problem(
            path="",
            value=document.data,
            limit=f"a mapping of {', '.join(structs.asdict(UserConfig()))}",
            fix="for example run_root: /scratch/me/runs",
        )
        document.report(problem)
        document.data = {}
    expand(document, environ)
    if isinstance(root := document.data.get("run_root"), str) and root.startswith("~/"):
        document.data["run_root"] = str(Path(environ.get("HOME", "/")) / root[2:])
    return Settings(config=decode_document(UserConfig, document), document=document)


def lay_under(document: Document, environ: Mapping[str, str]) -> None:
    """Put the user's settings where the spec says nothing, with their places."""
    settings = settings_of(environ)
    if settings is None:
        return
    mine = settings.document
    for key, (path, backend) in IN_SPECS.items():
        if key in mine.data and backend in (None, _backend_of(document.data)):
            _put_if_absent(document, path, mine.data[key], mine.places[key])


def _backend_of(data: dict[str, Any]) -> Any:
    cluster = data.get("cluster")
    return cluster.get("backend") if isinstance(cluster, dict) else None


def _put_if_absent(document: Document, path: str, value: Any, place: str) -> None:
    *above, last = path.split(".")
    inside = document.data
    for key in above:
        if inside.get(key) is None:
            inside[key] = {}
        inside = inside[key]
        if not isinstance(inside, dict):  # a mistake of the spec, which is reported there
            return
    if last not in inside:
        inside[last] = value
        document.places[path] = place
        document.from_user[path] = place


def user_run_root(environ: Mapping[str, str]) -> str | None:
    settings = settings_of(environ)
    return None if settings is None else settings.config.run_root


def user_price(environ: Mapping[str, str]) -> float | None:
    """Price of a GPU for an hour."""
    settings = settings_of(environ)
    return None if settings is None else settings.config.price


def _trusted_text(path: Path) -> str | None:
    """The file's text; None: there is none.

    It may name commands that ndctl runs, so nobody else may have written it.

    Raises:
        SpecError: it is not trusted, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            _check_owner(path, found)
            # Who can write a folder above can put another file, or link, in the place of this one.
            for folder in {*path.parents[:2], path.resolve().parent}:
                _check_owner(folder, folder.stat())
            return file.read().decode()
    except UnicodeDecodeError as exc:
        message = f"{path}: must be UTF-8 text, but byte {exc.start} is not"
        raise SpecError(message, fix="save the file as UTF-8") from exc
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        message = f"{path}: cannot be read: {exc.strerror}"
        raise SpecError(message, fix="make it a readable file, or remove it") from exc


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise SpecError(
            f"{path} belongs to user {found.st_uid}, who could make ndctl run commands for you",
            fix=f"copy it, and remove this one: it has to be your own ({path})",
        )
    # In a folder like /tmp with the sticky bit nobody can replace the files of others.
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise SpecError(
            f"{path} can be written by every user, who could make ndctl run commands for you",
            fix=f"chmod o-w {path}",
        )
