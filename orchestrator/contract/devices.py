"""Names of the devices that have a hardware profile, and the number format of each.

The profiles are in `inventory/profiles/`. The names are here because a spec may contain one.
"""

import re

from orchestrator.contract.spec.types import Auto, Dtype

GPU_NAMES = (
    "h100-sxm-80gb",
    "h100-sxm-96gb-500w",
    "h100-pcie-80gb",
    "h200-sxm-141gb",
    "a100-sxm-80gb",
    "a100-sxm-40gb",
    "b200-sxm-180gb",
    "gb200-186gb",
    "b300-sxm-270gb",
    "mi300x-192gb",
    "l40s-48gb",
    "rtx4090-24gb",
)
CPU = "cpu"
"""Profile of ranks that run without a GPU."""
PROFILE_NAMES = (*GPU_NAMES, CPU)
VENDORS = frozenset(("nvidia", "amd", "gpu", "geforce", "tesla", "instinct"))
OTHER_MODELS = frozenset(("a10", "l40"))
"""GPUs without a profile whose names look like a typo of one that has it."""


def nearest_gpu(word: object) -> str | None:
    """The GPU that `word` probably names, such as h100-sxm-80gb for `H100` or `nvidia-h100`: the
    commonest one whose name has all parts of the word. None if no GPU of this model is known: a job
    for a V100 must not be planned as one for an H100."""
    from orchestrator.contract.codec import nearest

    parts = [one for one in re.findall("[a-z0-9]+", str(word).lower()) if one not in VENDORS]
    known = [name for name in GPU_NAMES if any(_is_model(one, name) for one in parts)]
    alike = (name for name in known if all(one in name for one in parts))
    return next(alike, None) or nearest("-".join(parts), known)


def _is_model(part: str, name: str) -> bool:
    """Whether `part` of a word is the model of the GPU `name`, such as h100, or a typo of it."""
    model = name.split("-")[0]
    if part.startswith(model) or (len(part) >= len("4090") and part in model):
        return True
    # The first letter tells devices apart, such as gb300 and b300.
    if part in OTHER_MODELS or part[0] != model[0]:
        return False
    # A letter too many, too few, or two in the wrong order. Another letter or digit at one place
    # is another device, such as h800.
    longer, shorter = sorted((part, model), key=len, reverse=True)
    if len(longer) == len(shorter) + 1:
        return any(longer[:at] + longer[at + 1 :] == shorter for at in range(len(longer)))
    return any(
        part == model[:at] + model[at + 1] + model[at] + model[at + 2 :]
        for at in range(len(model) - 1)
    )


def compute_dtype(wish: Dtype | Auto, *, fast_bfloat16: bool) -> Dtype:
    """The number format in which a model computes. The planner and the trainer both ask here, so
    memory, speed and MFU are of the format that runs.

    Args:
        wish: `train.dtype`.
        fast_bfloat16: the device is a GPU with bfloat16 units. A CPU without them computes bfloat16
            no faster than float32.
    """
    if wish != "auto":
        return wish
    return "bfloat16" if fast_bfloat16 else "float32"
