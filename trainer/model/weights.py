"""The weights at the start of training: from safetensors of a Hugging Face folder, or drawn.

Each rank reads only its own slices, so no rank ever holds the whole model. Rank 0 compares the
files with the model before any long work starts.

torch's HuggingFaceStorageReader (2.13) reads slices too, but on every rank it first opens all files
of the folder for their metadata (18 opened files where this module opens 9), its `load` gathers a
plan of each rank on rank 0, and it accepts neither padded rows nor other names (a tied head, GPT-2
without prefix).
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from orchestrator.contract.read_json import read_json
from orchestrator.contract.spec.model_spec import ModelSpec
from orchestrator.errors import TrainingError
from trainer.listing import listed
from trainer.model.build import build_stages, read_model_config
from trainer.model.decoder import NamedWeights, StageSlice
from trainer.model.families import family_of
from trainer.model.init_weights import draw
from trainer.model.regions import local_part, local_region
from trainer.rank.ranks import broadcast_from_rank0

LOG = logging.getLogger("trainer")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
READABLE = ("F64", "F32", "F16", "BF16")
BLOCK_BYTES = 64 * 2**20
"""Bytes read at a time, so that a large slice is not in memory in two types."""
NOT_WEIGHTS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
"""Masks and frequencies that older versions of transformers saved with the weights."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in a safetensors file."""

    file: str
    """Name of the file in the folder."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the type in safetensors."""


@dataclass(frozen=True, slots=True)
class Weights:
    source: str
    """A folder or a hub id. Each host looks it up itself."""
    tensors: Mapping[str, Tensor]
    """By plain parameter name."""


def find_weights(spec: ModelSpec) -> Weights | None:
    """The tensors of `spec.weights`, matched with the model; None if it is not set.

    Raises:
        TrainingError: on every rank, with all differences.
    """
    if spec.weights is None:
        return None
    source = spec.weights
    return broadcast_from_rank0(lambda: match_weights(source, read_model_config(spec), spec.padded))


def first_weights(
    stages: Sequence[NamedWeights], weights: Weights | None, seed: int, *, resumed: bool
) -> None:
    """Fill this rank's parameters from `weights`, and draw those that are not in there.

    With `resumed`, only the frozen ones, because the checkpoint has the trained ones.
    """
    from_files: dict[str, list[tuple[torch.Tensor, Tensor]]] = defaultdict(list)
    tensors = weights.tensors if weights else {}
    for stage in stages:
        for name, parameter in stage.plain_parameters():
            if resumed and parameter.requires_grad:
                continue
            if name in tensors:
                from_files[tensors[name].file].append((parameter, tensors[name]))
            else:
                draw(name, parameter, seed, stage.config)
    if weights:
        _fill(weights.source, from_files)


def _fill(source: str, wanted: Mapping[str, Sequence[tuple[torch.Tensor, Tensor]]]) -> None:
    folder = weights_folder(source)
    num_bytes = 0
    for file, entries in wanted.items():
        with opened(folder / file) as tensors:
            for parameter, tensor in entries:
                num_bytes += read_part(tensors.get_slice(tensor.name), parameter)
    LOG.debug("read %.1f MiB of weights from %s", num_bytes / 2**20, folder)


@torch.no_grad()
def read_part(part: Any, parameter: torch.Tensor) -> int:
    """Copy this rank's part of `parameter` from a safetensors slice; returns the bytes read.

    Rows that the file lacks are those of a padded vocabulary. They become 0.
    """
    local, region = local_part(parameter), local_region(parameter)
    if not local.numel():
        return 0
    first, *rest = region
    end = max(first.start, min(first.stop, part.get_shape()[0]))
    local[end - first.start :].zero_()
    rows = max(1, BLOCK_BYTES * local.shape[0] // (local.numel() * local.element_size()))
    num_bytes = 0
    for start in range(first.start, end, rows):
        block = part[(slice(start, min(start + rows, end)), *rest)]
        local[start - first.start : start - first.start + len(block)].copy_(block)
        num_bytes += block.nbytes
    return num_bytes


def match_weights(source: str, config: PretrainedConfig, padded: Callable[[int], int]) -> Weights:
    """The tensor in `source` of each parameter of the model.

    Args:
        padded: the rows of the model's vocabulary, from those of the files.

    Raises:
        TrainingError: with all tensors that are missing, unexpected or of the wrong shape or type.
    """
    folder = weights_folder(source)
    saved = contents(folder)
    wanted = shapes_of(config)
    found = {name: _first_of(_names_of(name, config), saved) for name in wanted}
    tensors = {name: saved[key] for name, key in found.items() if key is not None}
    used = {tensor.name for tensor in tensors.values()}
    family = family_of(config)
    vocabulary = {f"{family.embedding}.weight", f"{family.head}.weight"}
    problems = [f"{name} is missing" for name, key in found.items() if key is None]
    problems += [
        f"{tensor.name} has shape {tensor.shape} in the files and {wanted[name]} in the model"
        for name, tensor in tensors.items()
        if tensor.shape != wanted[name]
        and not (
            name in vocabulary and (padded(tensor.shape[0]), *tensor.shape[1:]) == wanted[name]
        )
    ]
    problems += [
        f"{tensor.name} has type {tensor.dtype}, not one of {', '.join(READABLE)}"
        for tensor in tensors.values()
        if tensor.dtype not in READABLE
    ]
    problems += [
        f"{name} is not in the model"
        for name in saved
        if name not in used and not _is_copy(name, config) and not NOT_WEIGHTS.search(name)
    ]
    problems = problems or list(_untied(folder, tensors, saved, config))
    if problems:
        raise TrainingError(
            f"the weights in {folder} do not match the configured model: {listed(problems)}",
            fix="set model.path to the folder of the weights, to use its config.json",
        )
    return Weights(source, tensors)


def weights_folder(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(source, local_files_only=True))
    except (OSError, ValueError) as exc:
        raise TrainingError(
            f"model.weights {source} is neither a folder nor a model in the local hub cache",
            fix="give a folder with safetensors, or download the model on every host first",
        ) from exc


def contents(folder: Path) -> dict[str, Tensor]:
    """The tensors that the safetensors files of `folder` hold, by name.

    Raises:
        TrainingError: a file is missing or damaged.
    """
    files = _files_of(folder)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise TrainingError(
            f"{folder} lacks files that its index names: {listed(missing)}",
            fix="download or copy the folder again",
        )
    found: dict[str, Tensor] = {}
    for file in files:
        with opened(folder / file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                part = tensors.get_slice(name)
                found[name] = Tensor(file, name, tuple(part.get_shape()), part.get_dtype())
    return found


def _files_of(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.exists():
        if (folder / SINGLE).exists():
            return [SINGLE]
        raise TrainingError(
            f"{folder} has neither {SINGLE} nor {INDEX}",
            fix="give a folder of safetensors, as transformers' save_pretrained writes it",
        )
    try:
        return sorted(set(read_json(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as exc:
        raise TrainingError(
            f"failed to read {index} ({exc})", fix="download or copy the folder again"
        ) from exc


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The tensors of one safetensors file."""
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as exc:
        raise TrainingError(
            f"failed to read {path} ({exc}): it is damaged or not a safetensors file",
            fix="download or copy the file again, to every host",
        ) from exc


def shapes_of(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of the model, by plain name."""
    layers = config.num_hidden_layers
    (whole,) = build_stages(config, [StageSlice(0, layers, layers)])
    return {name: tuple(parameter.shape) for name, parameter in whole.plain_parameters()}


def _names_of(name: str, config: PretrainedConfig) -> list[str]:
    """Names that the parameter `name` may have in files, the most likely first."""
    family = family_of(config)
    names = [name]
    if config.tie_word_embeddings and name == f"{family.embedding}.weight":
        names.append(f"{family.head}.weight")
    # GPT-2's file was saved from the model without its head, so its names lack the first part.
    return names + [key.removeprefix(_prefix(config)) for key in names]


def _prefix(config: PretrainedConfig) -> str:
    return family_of(config).layers.split(".")[0] + "."


def _first_of(names: Sequence[str], saved: Mapping[str, Tensor]) -> str | None:
    return next((name for name in names if name in saved), None)


def _is_copy(name: str, config: PretrainedConfig) -> bool:
    """Whether `name` is the head of a model with tied embeddings."""
    return bool(config.tie_word_embeddings) and name == f"{family_of(config).head}.weight"


def _untied(
    folder: Path,
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
    config: PretrainedConfig,
) -> Iterator[str]:
    """A problem if head and embedding differ in the files, but the model ties them."""
    family = family_of(config)
    head, embedding = saved.get(f"{family.head}.weight"), tensors[f"{family.embedding}.weight"]
    if not config.tie_word_embeddings or head is None or head.name == embedding.name:
        return
    with opened(folder / head.file) as one, opened(folder / embedding.file) as other:
        first, second = one.get_slice(head.name), other.get_slice(embedding.name)
        rows = max(1, BLOCK_BYTES // (4 * head.shape[-1]))
        for start in range(0, head.shape[0], rows):
            if not torch.equal(first[start : start + rows], second[start : start + rows]):
                yield f"{head.name} differs from {embedding.name}, but tie_word_embeddings is true"
                return
