"""`python -m trainer.export RUN --out DIR` exports a checkpoint to a folder that transformers
loads, or PEFT if only adapters were trained.

Tensors are read and written one by one. Memory holds the tensors of one output file at a time, and
optimizer state is never read. The folder gets its name only when it is complete.
"""

import argparse
import copy
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ndctl.rank.checkpoint_files import damage, defect_of, final_name, read_marker, sync
from orchestrator.contract.files import exit_codes
from orchestrator.contract.files.checkpoint_names import newest_complete
from orchestrator.contract.files.run_dir import RunDir
from orchestrator.errors import TrainingError
from trainer.checkpoint.read import CheckpointReader
from trainer.checkpoint.state import MODEL, Origin
from trainer.listing import listed
from trainer.model.adapters import export_adapters
from trainer.model.weights import INDEX, SINGLE, shapes_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    checkpoint: Path
    out: Path
    dtype: str
    max_shard_bytes: int
    verify: bool


def main(arguments: Sequence[str]) -> int:
    """Export; returns the exit code of the process."""
    asked = _parser().parse_args(arguments)
    try:
        request = Export(
            checkpoint=find_checkpoint(Path(asked.run), asked.step),
            out=Path(asked.out),
            dtype=asked.dtype,
            max_shard_bytes=asked.max_shard_size,
            verify=not asked.no_verify,
        )
        for line in export(request):
            print(line)  # noqa: T201 (this is a command)
    except TrainingError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return exc.exit_code
    return exit_codes.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.export",
        description="Write a checkpoint as a Hugging Face folder: safetensors, config, tokenizer.",
    )
    parser.add_argument("run", metavar="RUN", help="run directory of a job, or `out` of a trainer")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to make")
    parser.add_argument("--step", type=int, metavar="N", help="[the newest complete checkpoint]")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="[float32]")
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default="5GB",
        metavar="SIZE",
        help="largest output file, for example 500MB; also the memory that the export uses [5GB]",
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not check the checksums of the files"
    )
    return parser


def parse_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]B)?", text, re.IGNORECASE)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 500MB or 5GB")
    return int(float(found[1]) * UNITS[(found[2] or "").upper()])


def find_checkpoint(run: Path, step: int | None) -> Path:
    """The checkpoint of `step`, or the newest complete one."""
    folder = RunDir(run).checkpoints
    if step is None:
        newest, rejected = newest_complete(folder)
        if newest is None:
            why = "".join(f"; {one.name}: {one.why}" for one in rejected)
            raise TrainingError(
                f"{folder} has no complete checkpoint{why}", fix="give the directory of a run"
            )
        return newest
    if defect := defect_of(folder / final_name(step)):
        known = sorted(path.name for path in folder.glob("step-*") if not defect_of(path))
        raise TrainingError(
            f"{folder / final_name(step)} is not a complete checkpoint: {defect}",
            fix=f"give the --step of one of {', '.join(known)}"
            if known
            else "give another run: this one has no complete checkpoint",
        )
    return folder / final_name(step)


def export(request: Export) -> Iterator[str]:
    """Export; yields lines for the user.

    Raises:
        TrainingError: reading the checkpoint or writing `out` failed.
    """
    if request.out.exists():
        raise TrainingError(
            f"{request.out} already exists", fix="give a folder that does not exist"
        )
    if request.verify:
        checksums = read_marker(request.checkpoint).get("sha256", {})
        if defect := damage(request.checkpoint, checksums, checksums):
            raise TrainingError(
                f"{request.checkpoint} is damaged: {defect}", fix="export another --step"
            )
    partial = request.out.with_name(f"{request.out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield from _fill(partial, request)
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(request.out)
        sync(request.out.parent)
    except OSError as exc:
        raise TrainingError(
            f"failed to write {request.out}: {exc}", fix="give a folder with enough free space"
        ) from exc
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    yield f"exported {request.checkpoint} to {request.out}"


def _fill(folder: Path, request: Export) -> Iterator[str]:
    reader = CheckpointReader(request.checkpoint)
    origin = reader.progress().origin
    config = _config(origin, request.dtype)
    if origin.lora is not None:
        # The checkpoint of a LoRA run has no base weights, so PEFT's format is the only choice.
        adapters = _weights(reader, DTYPES[request.dtype])
        export_adapters(adapters, origin.lora, config, origin.base, folder)
    else:
        _check_whole(request.checkpoint, reader, config)
        _write_weights(folder, reader, DTYPES[request.dtype], request.max_shard_bytes)
        config.save_pretrained(folder)
    yield from _copy_tokenizer(folder, origin.tokenizer)


def _weights(reader: CheckpointReader, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights in the checkpoint at once, because adapters are small."""
    keys = [key for key in reader.shapes if key.startswith(MODEL)]
    tensors = reader.tensors(keys)
    return {key.removeprefix(MODEL): tensors[key].to(dtype) for key in keys}


def _write_weights(
    folder: Path, reader: CheckpointReader, dtype: torch.dtype, max_bytes: int
) -> None:
    names = {key: key.removeprefix(MODEL) for key in reader.shapes if key.startswith(MODEL)}
    sizes = {key: reader.shapes[key].numel() * dtype.itemsize for key in names}
    files = files_of(sizes, max_bytes)
    for file, keys in files.items():
        tensors = {names[key]: reader.tensors([key])[key].to(dtype) for key in keys}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {names[key]: file for file, keys in files.items() for key in keys},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def files_of(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """File name to tensors, in order. A tensor larger than `max_bytes` gets a file of its own."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": names
        for number, names in enumerate(groups, start=1)
    }


def _config(origin: Origin, dtype: str) -> PretrainedConfig:
    values: dict[str, Any] = copy.deepcopy(dict(origin.config))
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.dtype = DTYPES[dtype]
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    return config


def _check_whole(checkpoint: Path, reader: CheckpointReader, config: PretrainedConfig) -> None:
    saved = {key.removeprefix(MODEL) for key in reader.shapes if key.startswith(MODEL)}
    different = sorted(saved ^ shapes_of(copy.deepcopy(config)).keys())
    if different:
        raise TrainingError(
            f"the weights in {checkpoint} are not those of the whole model: they differ in"
            f" {listed(different)}",
            fix="export a checkpoint of a run that trained all weights",
        )


def _copy_tokenizer(folder: Path, tokenizer: str) -> Iterator[str]:
    if tokenizer in ("", "bytes"):
        return
    try:
        source = Path(tokenizer)
        if not source.is_dir():
            source = Path(snapshot_download(tokenizer, local_files_only=True))
    except (OSError, ValueError):
        yield f"warning: exported without a tokenizer: {tokenizer} no longer exists"
        return
    for name in _present(source, TOKENIZER_FILES):
        shutil.copyfile(source / name, folder / name)


def _present(folder: Path, names: Iterable[str]) -> list[str]:
    return [name for name in names if (folder / name).is_file()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
