"""The folders of mirrors on this machine. It imports almost nothing, because every verb uses it and
most users have no mirrors."""

from pathlib import Path

FOLDER = ".kubernetes"
REMOTE = "remote.json"
IN_CLUSTER = "in-cluster"
"""The context name inside a pod."""


def folder_of(run_root: Path, context: str, namespace: str, job: str) -> Path:
    from urllib.parse import quote

    return (run_root / FOLDER / quote(context, safe="") / namespace / job).absolute()


def run_root_above(mirror: Path) -> Path:
    return mirror.absolute().parents[3]


def options_of(run_root: Path, mirror: Path) -> tuple[str, ...]:
    """The options that a verb needs in addition to the job's name, if several jobs have that
    name."""
    others = [path for path in known_mirrors(run_root, mirror.name) if path != mirror.absolute()]
    if not others and not (run_root / mirror.name / "journal.jsonl").exists():
        return ()
    return place_options(mirror)


def place_options(mirror: Path) -> tuple[str, ...]:
    """The options that name the cluster and the namespace of a mirror's job."""
    from urllib.parse import unquote

    context, namespace = mirror.absolute().parts[-3:-1]
    named = () if unquote(context) == IN_CLUSTER else ("--context", unquote(context))
    return (*named, "--namespace", namespace)


def is_mirror(path: Path) -> bool:
    return (path / REMOTE).exists()


def known_mirrors(run_root: Path, job: str = "*") -> list[Path]:
    """Folders of existing mirrors."""
    found = (run_root / FOLDER).glob(f"*/*/{job}/{REMOTE}")
    return sorted(path.parent.absolute() for path in found)
