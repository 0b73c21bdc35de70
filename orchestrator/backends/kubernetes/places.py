"""Where this machine keeps what it knows of jobs in clusters. Imports next to nothing: most who ask
have none."""

from pathlib import Path

FOLDER = ".kubernetes"
REMOTE = "remote.json"


def folder_of(run_root: Path, context: str, namespace: str, job: str) -> Path:
    from urllib.parse import quote

    return (run_root / FOLDER / quote(context, safe="") / namespace / job).absolute()


def is_mirror(path: Path) -> bool:
    return (path / REMOTE).exists()


def known_mirrors(run_root: Path, job: str = "*") -> list[Path]:
    """Folders of jobs that were seen before."""
    found = (run_root / FOLDER).glob(f"*/*/{job}/{REMOTE}")
    return sorted(path.parent.absolute() for path in found)
