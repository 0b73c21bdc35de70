"""Times of single operations compared with published measurements."""

import csv
import math

import pytest

from benchmarks.published.runs import FOLDER
from orchestrator.contract.devices import PROFILE_NAMES
from orchestrator.inventory.profile import Fabric
from orchestrator.inventory.profiles import load_profile
from orchestrator.plan.cost.kernels import attention_s, matmul_s
from orchestrator.plan.cost.layers import Slice, attention_of
from orchestrator.plan.cost.machine import Machine, machine_of
from orchestrator.plan.cost.tp_cp_traffic import context_traffic
from orchestrator.plan.model.families import shape_of
from orchestrator.plan.model.shape import ModelShape
from tests.plan.cost.setups import H100, LLAMA_8B, fabric

MACHINE = machine_of(H100)
# OpenXLA, service/gpu/model/matmul_interpolator_data.h: bfloat16 on an H100, 1e12 operations a
# second of a single product. `tiles`, `split` and `depth_half` were fitted to these and others.
PRODUCTS = [
    (1024, 4096, 4096, 738),
    (2048, 4096, 4096, 754),
    (4096, 4096, 1024, 677),
    (512, 4096, 4096, 644),
    (1024, 1024, 4096, 470),
    (4096, 256, 4096, 376),
    (1024, 4096, 512, 339),
    (2048, 4096, 256, 299),
    (1024, 1024, 1024, 236),
    (4096, 1024, 2048, 632),
    (256, 4096, 1024, 225),
]
ALONE_S = 5e-6
"""A single product takes this many seconds longer."""


def tera(rows: int, columns: int, inner: int) -> float:
    seconds = matmul_s(MACHINE, rows, columns, inner, "bfloat16")
    # The measured chip ran at its full clock. The calibrated profile has the sustained clock.
    full = 900e12 / MACHINE.rates["bfloat16"]
    seconds = (seconds - MACHINE.calibration.gap_s) / full + ALONE_S
    return 2 * rows * columns * inner / seconds / 1e12


def test_products_are_as_fast_as_measured_within_a_tenth_on_average() -> None:
    errors = [math.log(tera(m, n, k) / measured) for m, n, k, measured in PRODUCTS]
    assert math.sqrt(sum(error**2 for error in errors) / len(errors)) < 0.1
    assert max(abs(error) for error in errors) < 0.2


def published(name: str) -> list[dict[str, str]]:
    with (FOLDER / "kernels" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_large_products_on_b200_are_as_fast_as_published() -> None:
    machine = machine_of(fabric("b200-sxm-180gb"))
    errors = []
    for row in published("products"):
        m, n, k = int(row["rows"]), int(row["columns"]), int(row["inner"])
        if row["device"] == "b200-sxm-180gb" and 2 * m * n * k > 1e12:
            planned = 2e-12 * m * n * k / matmul_s(machine, m, n, k, "bfloat16")
            errors.append(planned / float(row["tflops"]) - 1)
    assert len(errors) == 250
    assert sum(map(abs, errors)) / len(errors) < 0.06
    assert max(map(abs, errors)) < 0.3


def test_thin_products_are_bound_by_memory() -> None:
    seconds = matmul_s(MACHINE, 16, 4096, 4096, "bfloat16")
    assert seconds > 2 * 4096 * 4096 / H100.profile.memory_bytes_per_s


def cool(machine: Machine) -> float:
    """Rate of attention on a cool chip, relative to that in training."""
    peak = machine.fabric.profile.flops["bfloat16"]
    return peak * machine.kernel.forward / machine.attention["bfloat16"][0]


@pytest.mark.parametrize(
    ("profile", "kernel", "passes", "most"),
    [
        ("h100-sxm-80gb", "flash2", "forward", 0.08),
        ("h100-sxm-80gb", "flash2", "backward", 0.08),
        ("h100-sxm-80gb", "flash2", "both", 0.11),
        ("h100-sxm-80gb", "cudnn", "forward", 0.06),
        ("a100-sxm-80gb", "flash2", "both", 0.05),
        ("b200-sxm-180gb", "cudnn", "forward", 0.12),
        ("b200-sxm-180gb", "cudnn", "backward", 0.15),
    ],
)
def test_attention_is_as_fast_as_published(
    profile: str, kernel: str, passes: str, most: float
) -> None:
    """Causal, heads of 128."""
    known = load_profile(profile, {"calibration": {"attention": kernel}}, "this test")
    machine = machine_of(Fabric(profile=known, hosts=1, devices_per_host=8))
    errors = []
    for row in published("attention"):
        same = (row["device"], row["kernel"], row["pass"]) == (profile, kernel, passes)
        if not same or row["causal"] == "false" or row["head_features"] != "128":
            continue
        tokens, sequences = int(row["tokens"]), int(row["sequences"])
        width, scores = 128 * int(row["heads"]), sequences * tokens**2 / 2
        seconds = attention_s(machine, scores, width, 128, tokens, sequences * tokens)
        products = {"forward": (4, seconds[0]), "backward": (10, seconds[1])}
        operations, took = products.get(passes, (14, sum(seconds)))
        # Kernels of 128k tokens run for so long that the chip gets hot.
        rate = 1.0 if tokens > 100_000 else cool(machine)
        planned = operations * scores * width / took * rate / 1e12
        errors.append(abs(planned / float(row["tflops"]) - 1))
    assert len(errors) > 4
    assert sum(errors) / len(errors) < most


def test_attention_on_a_part_of_a_sequence_is_as_fast_as_published() -> None:
    """Parts of documents of 4k to 64k tokens, on a rank of up to 8 along tp and cp."""
    known = load_profile("h100-sxm-80gb", {"calibration": {"attention": "flash2"}}, "this test")
    machine = machine_of(Fabric(profile=known, hosts=1, devices_per_host=8))
    errors: dict[tuple[int, int], list[float]] = {}
    for row in published("sharded_attention"):
        heads, tokens, cp = int(row["heads"]), int(row["tokens"]), int(row["cp"])
        shape = llama(128 * heads, heads, int(row["kv_heads"]))
        part = Slice(sequences=1, tokens=tokens, cp=cp, tp=int(row["tp"]))
        planned_ms = 1e3 * attention_of(machine, shape, part)[0] / cool(machine)
        errors.setdefault((tokens, cp), []).append(planned_ms / float(row["ms"]) - 1)
    every = [error for group in errors.values() for error in group]
    assert len(every) == 80
    assert sum(map(abs, every)) / len(every) < 0.06
    long = [error for (tokens, _), group in errors.items() if tokens >= 32768 for error in group]
    assert max(map(abs, long)) < 0.09


def llama(hidden: int, heads: int, kv_heads: int) -> ModelShape:
    return shape_of(
        {
            "model_type": "llama",
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
        }
    )


@pytest.mark.parametrize("row", published("ring_attention"), ids=lambda row: row["device"])
def test_ring_attention_costs_as_much_as_published(row: dict[str, str]) -> None:
    """The speed of 8 devices, relative to 8 times that of one."""
    link = {"intra_host": {"bytes_per_s": float(row["link_bytes_per_s"] or 300e9)}}
    known = load_profile(row["device"], link, "this test")
    machine = machine_of(Fabric(profile=known, hosts=1, devices_per_host=8))
    heads, tokens = int(row["heads"]), int(row["tokens_per_rank"])
    shape = llama(128 * heads, heads, int(row["kv_heads"]))
    alone = attention_of(machine, shape, Slice(sequences=1, tokens=tokens))
    part = Slice(sequences=1, tokens=8 * tokens, cp=8)
    ring = attention_of(machine, shape, part)
    traffic, merging = context_traffic(machine, shape, part)
    forward = ring[0] + merging + sum(one.forward.exposed for one in traffic)
    backward = ring[1] + 2 * merging + sum(one.backward.exposed for one in traffic)
    both = row["pass"] == "both"
    planned = 8 * (sum(alone) if both else alone[0]) / (forward + backward * both)
    measured = 8 * float(row["ring_of_8_per_s"]) / float(row["alone_per_s"])
    assert planned == pytest.approx(measured, rel=0.13)


def test_narrow_and_wide_heads_are_slower() -> None:
    forward = [attention_s(MACHINE, 1e8, 2048, head, 4096, 4096)[0] for head in (64, 128, 256)]
    assert forward[1] < min(forward[0], forward[2])


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_attention_in_float32_is_no_faster_than_the_peak_in_float32(profile: str) -> None:
    """FlashAttention has no float32 kernel. A CPU has one rate in both types."""
    machine = machine_of(fabric(profile))
    half, single = (
        attention_of(machine, LLAMA_8B, Slice(sequences=1, tokens=32768, dtype=dtype))
        for dtype in ("bfloat16", "float32")
    )
    operations = 4 * 32768**2 / 2 * LLAMA_8B.query_size
    peaks = machine.fabric.profile.flops
    assert operations / single[0] < peaks["float32"]
    if profile == "cpu":
        assert single == half
    else:
        assert single[0] / half[0] == pytest.approx(peaks["bfloat16"] / peaks["float32"], rel=1e-3)


def test_few_heads_leave_processors_idle() -> None:
    whole, part = (attention_s(MACHINE, 1e8, 128 * n, 128, 4096, 4096)[0] / n for n in (64, 2))
    assert part > 1.8 * whole


def test_less_power_slows_products_more_than_memory() -> None:
    slower = machine_of(fabric("h100-sxm-96gb-500w"))
    of_full = slower.rates["bfloat16"] / MACHINE.rates["bfloat16"]
    assert 0.75 < of_full < 0.9
    assert of_full < slower.attention["bfloat16"][0] / MACHINE.attention["bfloat16"][0] < 1
    assert slower.calibration.certainty == "derived"
