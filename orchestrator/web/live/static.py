"""The style sheet and the scripts, read once."""

from hashlib import sha256
from importlib.resources import files

from msgspec import Struct

FILES = {
    "page.css": "static/page.css",
    "page.js": "static/page.js",
    "uplot.css": "static/vendor/uplot/uplot.css",
    "uplot.js": "static/vendor/uplot/uplot.js",
}
TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


class StaticFiles(Struct, frozen=True):
    contents: dict[str, bytes]
    version: str
    """Changes with the contents."""


def static_files() -> StaticFiles:
    """Raises OSError if ndctl is not installed completely."""
    package = files("orchestrator.web")
    contents = {name: package.joinpath(path).read_bytes() for name, path in FILES.items()}
    digest = sha256(b"".join(contents.values())).hexdigest()[:12]
    return StaticFiles(contents, digest)


def type_of(name: str) -> str:
    return TYPES[name.rpartition(".")[2]]
