"""Addresses of pages. The name of a job is enough, unless several jobs have it."""

import re
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from msgspec import Struct

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
"""Names of directories that were not submitted by ndctl may be anything."""
ANY = "-"
"""Stands for a name that no address can have."""


class Address(Struct, frozen=True, kw_only=True):
    """Which page."""

    name: str | None = None
    """Name of the job; None: the page of all jobs."""
    digest: str | None = None
    """See `digest_of`; None: the name is enough."""
    incident: int | None = None
    everything: bool = False
    """Also jobs that ended long ago."""


@lru_cache(maxsize=1 << 14)
def digest_of(run_dir: str | Path) -> str:
    return sha256(str(run_dir).encode(errors="surrogatepass")).hexdigest()[:12]


def job_path(
    run_dir: str | Path, *, alone: bool, incident: int | None = None, verb: str = ""
) -> str:
    """The path of the page of a job.

    Args:
        alone: no other job has its name.
        verb: `cancel` for the path of its form.
    """
    name = Path(run_dir).name
    plain = _PLAIN.fullmatch(name) is not None
    path = f"/job/{name if plain else ANY}"
    if incident is not None:
        path += f"/incident/{incident}"
    if verb:
        path += f"/{verb}"
    return path if alone and plain else f"{path}?in={digest_of(run_dir)}"


def meant(run_dirs: Iterable[str], address: Address) -> list[str]:
    """Those of these run directories that have the name and the digest of an address."""
    if address.digest is not None:
        return [one for one in run_dirs if digest_of(one) == address.digest]
    return [one for one in run_dirs if name_of(one) == address.name]


def name_of(run_dir: str) -> str:
    return run_dir.rpartition("/")[2]
