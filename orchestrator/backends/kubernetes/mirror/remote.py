"""`remote.json` of a mirror: which job it is a copy of, and how much of each file was copied."""

import json
from pathlib import Path
from shlex import join, quote

from msgspec import Struct
from msgspec.structs import asdict

from ndctl.rank.regular_file import read_regular
from orchestrator.backends.kubernetes.mirror.mirror_paths import REMOTE, place_options
from orchestrator.backends.kubernetes.render.names import CONTAINERS
from orchestrator.contract.codec import decode
from orchestrator.contract.files.atomic_write import write_whole
from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.kubernetes_spec import Kind
from orchestrator.errors import JobError


class Remote(Struct, frozen=True, kw_only=True):
    context: str
    namespace: str
    kind: Kind
    job: str
    run_dir: str
    """Path in the pods."""
    python: str
    """Interpreter in the pods."""
    launch: int
    settled: bool = True
    """False while the launch is being submitted, or if that was interrupted: the cluster may not
    have it."""
    journal: int = 0
    """Bytes copied. Local lines after them are an assumption of this machine."""
    metrics: int = 0
    led_at: float | None = None
    """When a leader was last known to be alive, by this machine's clock."""

    @property
    def container(self) -> str:
        """Name of the container of ranks and leader in each pod."""
        return CONTAINERS[self.kind]


def read_remote(mirror: Path) -> Remote:
    """
    Raises:
        JobError: the file is damaged or gone, or may not be read.
    """
    file = mirror / REMOTE
    try:
        return decode(Remote, read_json(read_regular(file)))
    except PermissionError as exc:
        raise JobError(f"{file} cannot be read: {exc.strerror}", fix="ask its owner") from exc
    except (OSError, ValueError) as exc:
        again = ["ndctl", "status", mirror.name, "--backend", "kubernetes", *place_options(mirror)]
        raise JobError(
            f"{file} is not as ndctl wrote it, so this copy of a job cannot be used: {exc}",
            fix=f"remove the copy with `rm -r {quote(str(mirror))}`; `{join(again)}` makes a new"
            " one of the job in the cluster",
        ) from exc


def write_remote(mirror: Path, remote: Remote) -> None:
    write_whole(mirror / REMOTE, json.dumps(asdict(remote), indent=2).encode())
