"""Gives mkdocs every document of the repository under its own path, so that relative links hold.

mkdocs reads one folder. README.md, manifests/README.md and the examples lie outside of `docs`, and
documents link to them. The site has the same paths as the repository.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PATTERNS = (
    "*.md",
    "LICENSE",
    "docs/*.md",
    "docs/images/*",
    "benchmarks/results/*.md",
    "corpus/README.md",
    "examples/*",
    "examples/scripts/*",
    "examples/inventories/*",
    "manifests/**/README.md",
    "manifests/image/Containerfile",
    "slurm/**/README.md",
)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for file in list(files.documentation_pages()) + list(files.media_files()):
        files.remove(file)
    paths = {path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files
