"""The model's config.json, from wherever a spec says that it is."""

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
"""What may be the name of a model on the Hugging Face hub."""


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it fetched, by its own environment variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if name in environ:
            return Path(environ[name])
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"


def read_model_config(model: ModelSpec, hub: Path) -> dict[str, Any]:
    """The values of the model's config; `hub` is the local Hugging Face cache. Nothing is fetched.

    Raises:
        SpecError: `model.path` leads to no readable config.json.
    """
    if model.preset is not None:
        return deepcopy(dict(PRESETS[model.preset]))  # transformers writes into what it is given
    if model.config is not None:
        return deepcopy(dict(model.config))
    assert model.path is not None
    file = _find(model.path, hub)
    try:
        config = read_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        message = f"model.path: {file} cannot be read as JSON ({exc})"
        raise SpecError(message, fix="fetch it again, or save the model's config anew") from exc
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
            f"model.path: must be a folder with a config.json, {local} has none",
            fix="give the folder that save_pretrained wrote",
        )
    files = (folder / "config.json" for folder in cached_snapshots(path, hub))
    cached = next((file for file in files if file.is_file()), None)
    if cached is None:
        raise SpecError(
            f"model.path: must be a folder or a hub id in the local cache, got {path!r};"
            f" there is no {local} and nothing of it under {hub}",
            fix=f"fetch its config first: hf download {path} config.json"
            if HUB_ID.fullmatch(path)
            else "there is no such folder: check the path",
        )
    return cached


def cached_snapshots(name: str, hub: Path, *, main_alone: bool = False) -> list[Path]:
    """Folders of the hub cache that hold `name`: the revision that `main` names, and unless it
    alone is asked for the others, the last in name order first."""
    repository = hub / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    named = [main.read_text().strip()] if main.is_file() else []
    there = sorted((one.name for one in (repository / "snapshots").glob("*")), reverse=True)
    others = [] if main_alone else there
    folders = (repository / "snapshots" / revision for revision in [*named, *others])
    return [folder for folder in folders if folder.is_dir()]
