"""Reads the model's config.json from the place that a spec names."""

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.model_presets import PRESETS
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.errors import SpecError

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
"""Pattern of names of models on the Hugging Face hub."""


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Folder where huggingface_hub keeps downloads, according to its environment variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if name in environ:
            return Path(environ[name])
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"


def read_model_config(model: ModelSpec, hub: Path) -> dict[str, Any]:
    """The values of the model's config, with a padded vocabulary if the spec asks for it. `hub` is
    the local Hugging Face cache. Nothing is downloaded.

    Raises:
        SpecError: `model.path` has no readable config.json, or no vocabulary that can be padded.
    """
    values = _values(model, hub)
    if model.pad_vocab_to_multiple_of is None:
        return values
    size = values.get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise SpecError(
            "model.pad_vocab_to_multiple_of: needs a vocab_size in the model's config,"
            f" got {'none' if size is None else repr(size)}",
            fix="add vocab_size to the config, or drop model.pad_vocab_to_multiple_of",
        )
    return values | {"vocab_size": model.padded(size)}


def _values(model: ModelSpec, hub: Path) -> dict[str, Any]:
    if model.preset is not None:
        return deepcopy(dict(PRESETS[model.preset]))  # transformers modifies its argument
    if model.config is not None:
        return deepcopy(dict(model.config))
    assert model.path is not None
    file = _find(model.path, hub)
    try:
        config = read_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        message = f"model.path: {file} cannot be read as JSON ({exc})"
        raise SpecError(message, fix="download it again, or save the model's config again") from exc
    if not isinstance(config, dict):
        message = f"model.path: {file} must hold a JSON object, got {type(config).__name__}"
        raise SpecError(message, fix="give the config.json of a transformers model")
    return config


def _find(path: str, hub: Path) -> Path:
    local = Path(path).expanduser()
    if local.is_file():
        return local
    if (local / "config.json").is_file():
        return local / "config.json"
    if local.is_dir():
        raise SpecError(
            f"model.path: must be a folder with a config.json, but {local} has none",
            fix="give the folder that save_pretrained wrote",
        )
    files = (folder / "config.json" for folder in cached_snapshots(path, hub))
    cached = next((file for file in files if file.is_file()), None)
    if cached is None:
        raise SpecError(
            f"model.path: must be a folder or a hub id in the local cache, got {path!r};"
            f" there is no {local}, and {hub} has no such model",
            fix=f"download its config first: hf download {path} config.json"
            if HUB_ID.fullmatch(path)
            else "there is no such folder: check the path",
        )
    return cached


def cached_snapshots(name: str, hub: Path, *, main_alone: bool = False) -> list[Path]:
    """Folders of the hub cache with revisions of `name`: the one that `main` names, then (unless
    `main_alone`) the others in reverse name order."""
    repository = hub / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    named = [main.read_text().strip()] if main.is_file() else []
    there = sorted((one.name for one in (repository / "snapshots").glob("*")), reverse=True)
    others = [] if main_alone else there
    folders = (repository / "snapshots" / revision for revision in [*named, *others])
    return [folder for folder in folders if folder.is_dir()]
