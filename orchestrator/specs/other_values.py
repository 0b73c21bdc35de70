"""What values of keys are called in other tools, and here."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.contract.codec import ABSENT, Problem

FEW = 12
"""So many names of keys fit into a message."""
NO_SCALING = "set it to bfloat16: the trainer has no loss scaling"
FORMATS: Mapping[str, str] = {
    **dict.fromkeys(("fp16", "float16", "half", "16", "16-mixed", "16-true"), NO_SCALING),
    **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true"), "did you mean bfloat16?"),
    **dict.fromkeys(("fp32", "32", "32-true", "float", "full"), "did you mean float32?"),
}
DATA_PARALLEL: Mapping[str, str] = {
    **dict.fromkeys(("zero3", "zero-3", "deepspeed_stage_3", "full_shard"), "did you mean fsdp?"),
    **dict.fromkeys(
        ("zero2", "zero-2", "deepspeed_stage_2", "shard_grad_op"),
        "did you mean fsdp, with parallel.fsdp: {reshard_after_forward: false}?",
    ),
    **dict.fromkeys(
        ("hsdp", "hybrid_shard"), "did you mean fsdp? parallel.dp_replicate above 1 makes it HSDP"
    ),
    **dict.fromkeys(("zero0", "no_shard", "dp"), "did you mean ddp?"),
    **dict.fromkeys(("zero-1", "deepspeed_stage_1"), "did you mean zero1?"),
}
BACKENDS: Mapping[str, str] = dict.fromkeys(("k8s", "kube", "kubeflow"), "did you mean kubernetes?")
WORDS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("train.dtype", "train.reduce_dtype", "train.output_dtype"), FORMATS),
    "parallel.data": DATA_PARALLEL,
    "cluster.backend": BACKENDS,
}
"""Key -> its value elsewhere, in lower case -> a fix."""


def fix_of_value(problem: Problem) -> str | None:
    """A better fix for a wrong value; None: the codec's is as good."""
    path, value = problem.path, problem.value
    if isinstance(value, str) and (fix := WORDS.get(path, {}).get(value.lower())) is not None:
        return fix
    if path in BY_KEY and (fix := BY_KEY[path](value)) is not None:
        return fix
    if isinstance(value, str) and (fix := _text_fix(problem, value)) is not None:
        return fix
    if value == -1 and "'auto'" in problem.limit:
        return f"set {path} to auto, and ndctl chooses"
    if problem.limit == "key: value pairs" and isinstance(value, list):
        if pairs := _pairs(value):
            return f"write {path}: {pairs}"
        if value and all(isinstance(one, dict) for one in value):
            return f"remove the - in front of {', '.join(key for one in value for key in one)}"
    if problem.limit == "key: value pairs" and problem.fix.count(",") >= FEW:
        return f"write key: value pairs; `ndctl explain {path}` lists the keys"
    return None


DOUBLE = "\u201c\u201d\u201e\u00ab\u00bb"
SINGLE = "\u2018\u2019\u201a"
QUOTES = str.maketrans({**dict.fromkeys(DOUBLE, '"'), **dict.fromkeys(SINGLE, "'")})
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", re.IGNORECASE)
PLAIN = re.compile(r"[\w.:/,@%+-]+")
THOUSANDS = re.compile(r"(\d+)\s*k", re.IGNORECASE)
SECONDS = re.compile(
    r"(\d+(?:\.\d+)?)\s*(s|sec|second|m|min|minute|h|hr|hour|d|day)s?", re.IGNORECASE
)
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _text_fix(problem: Problem, value: str) -> str | None:
    """The fix of a text that an editor has changed, or in which a number was written."""
    if (fix := straight_quotes(value)) is not None:
        return fix
    if problem.limit.startswith("one word, without spaces"):
        # The example of the limit is a partition, and the value may be of any kind.
        together = "".join(value.split())
        said = f"without spaces it is {together}; " if PLAIN.fullmatch(together) else ""
        key = problem.path.partition("[")[0]
        return f"{said}`ndctl explain {key}` says what it takes"
    if "number" not in problem.limit:
        return None
    if NUMBER.fullmatch(value):
        return f"write {value} without quotes"
    if "whole" in problem.limit and (thousands := THOUSANDS.fullmatch(value.strip())):
        times = 1024 if "length" in problem.path else 1000
        return f"did you mean {int(thousands[1]) * times}?"
    found = SECONDS.fullmatch(value.strip())
    if found is None or "seconds" not in _about(problem.path):
        return None
    return f"write {float(found[1]) * UNITS[found[2][0].lower()]:g}, a number of seconds"


def straight_quotes(value: str) -> str | None:
    """The fix of a text in the quotes of a word processor, which are letters to YAML."""
    straight = value.translate(QUOTES)
    quoted = straight[:1] in ('"', "'") and straight[-1] == straight[0]
    if not quoted or straight == value:
        return None
    return f"write {straight}: YAML knows no typographic quotes"


def _about(path: str) -> str:
    from orchestrator.errors import SpecError
    from orchestrator.specs.keys import key_at

    try:
        return key_at(path).about.lower()
    except SpecError:
        return ""


def _pairs(items: Sequence[Any]) -> str:
    """A list of names and values, as in a pod, as key: value pairs; empty: it is no such list."""
    if not all(isinstance(one, dict) and "name" in one for one in items):
        return ""
    told = (
        f"{one['name']}: {json.dumps(one.get('value', '…'), ensure_ascii=False)}" for one in items
    )
    return f"{{{', '.join(told)}}}"


def _model(value: Any) -> str | None:
    from orchestrator.contract.spec.model_presets import PRESETS

    if isinstance(value, str):
        key = "preset" if value in PRESETS else "path"
        # Another word is no hub id and no folder.
        return f"write model: {{{key}: {value}}}" if key == "preset" or "/" in value else None
    if value is not ABSENT:
        return None
    return "add model: {preset: llama-tiny}, or {path: FOLDER or hub id}, or {config: {…}}"


def _run(value: Any) -> str | None:
    if not isinstance(value, str):
        return None
    from orchestrator.specs.foreign.command_lines import run_of

    return f"write {run_of(value)}; ndctl starts it on each rank, without torchrun"


def _fsdp(value: Any) -> str | None:
    """`fsdp: full_shard`, or `fsdp: 8`, as other tools write how parameters are sharded."""
    if isinstance(value, bool):
        return f"write parallel.data: {'fsdp' if value else 'ddp'}"
    if isinstance(value, int):
        return f"did you mean parallel.dp_shard: {value}?"
    fix = DATA_PARALLEL.get(str(value).lower(), "")
    return fix.replace("did you mean ", "did you mean parallel.data: ") or None


def _gpu(value: Any) -> str | None:
    from orchestrator.contract.devices import GPU_NAMES, nearest_gpu

    # A GPU that exists may be wrong for another reason, which the problem says.
    if not isinstance(value, str) or value in GPU_NAMES:
        return None
    if near := nearest_gpu(value):
        return f"did you mean {near}?"
    return (
        f"set cluster.gpu to one of {', '.join(GPU_NAMES)}; for another GPU leave it out, and give"
        " --inventory a file that `ndctl calibrate --write FILE` has made there"
    )


def _every(value: Any) -> str | None:
    if isinstance(value, str) and SECONDS.fullmatch(value.strip()):
        return "give a number of steps, checkpoint.every_steps; with auto ndctl chooses it"
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return f"did you mean checkpoint.every_steps: {value}?" if is_number else None


def _inside(above: str, key: str) -> Callable[[Any], str | None]:
    """For `optimizer: adamw`: the text is the value of a key inside."""

    def fix(value: Any) -> str | None:
        return f"write {above}: {{{key}: {json.dumps(value)}}}" if isinstance(value, str) else None

    return fix


def _args(value: Any) -> str | None:
    """`args: --lr 3e-4`, as in a shell."""
    try:
        words = shlex.split(value) if isinstance(value, str) else []
    except ValueError:
        return None
    return f"write run.args: {json.dumps(words, ensure_ascii=False)}" if words else None


def _notify(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    return f"write a list: notify: [{{{', '.join(f'{key}: …' for key in value)}}}]"


SPAN = re.compile(r"(\d+)\s*(d|day|h|hr|hour|m|min|minute)s?", re.IGNORECASE)
MINUTES = {"d": 1440, "h": 60, "m": 1}


def _files(value: Any) -> str | None:
    """`files: [GLOB]`, as other tools have it."""
    if not isinstance(value, list) or len(value) != 1:
        return None
    return f"write data.files: {json.dumps(value[0], ensure_ascii=False)}"


def _slurm_time(value: Any) -> str | None:
    """`24h` as Slurm writes it."""
    if (found := SPAN.fullmatch(str(value).strip())) is None:
        return None
    minutes = int(found[1]) * MINUTES[found[2][0].lower()]
    days, rest = divmod(minutes, 1440)
    clock = f"{rest // 60:02}:{rest % 60:02}:00"
    return f'did you mean "{days}-{clock}"?' if days else f'did you mean "{clock}"?'


OTHER_MODELS = "other models: model.path (a folder or a hub id) or model.config"


def _preset(value: Any) -> str | None:
    """The preset of the nearest size, such as llama3-8b for llama-7b, or of the nearest name. No
    preset may be near, so how to name any other model is always said."""
    from orchestrator.contract.codec import nearest
    from orchestrator.contract.spec.model_presets import PRESETS

    if not isinstance(value, str):
        return None
    family, size = re.match(r"[a-z]+", value.lower()), _billions(value)
    alike = {
        preset: billions
        for preset in PRESETS
        if family is not None and preset.startswith(family[0])
        if (billions := _billions(preset)) is not None
    }
    if size is None or not alike:
        best = nearest(value, PRESETS)
    else:
        best = min(alike, key=lambda preset: abs(alike[preset] - size))
    if best is None:
        return f"presets: {', '.join(PRESETS)}; {OTHER_MODELS}"
    return f"did you mean {best}? {OTHER_MODELS.capitalize()}"


def _billions(name: str) -> float | None:
    found = re.search(r"(\d+(?:\.\d+)?)b\b", name.lower())
    return None if found is None else float(found[1])


BY_KEY: Mapping[str, Callable[[Any], str | None]] = {
    "checkpoint.every": _every,
    "cluster": _inside("cluster", "backend"),
    "cluster.gpu": _gpu,
    "cluster.slurm.time": _slurm_time,
    "data": _inside("data", "files"),
    "data.files": _files,
    "model": _model,
    "model.preset": _preset,
    "notify": _notify,
    "parallel.fsdp": _fsdp,
    "run": _run,
    "run.args": _args,
    "train.optimizer": _inside("train.optimizer", "name"),
    "train.schedule": _inside("train.schedule", "kind"),
}
"""Key -> what to do about its value."""
