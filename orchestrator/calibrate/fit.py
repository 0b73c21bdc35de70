"""Writes measured numbers over a profile: the data of a profile file.

Where the profile of a device is known, nominal rates and links stay, and the measured shares of
them go to its `calibration`. Constants that were fitted to whole training runs stay too: a few
operations cannot replace them. The profile of a CPU is a guess, so all its rates are replaced.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from orchestrator.calibrate.links import LinkRate, link_of
from orchestrator.calibrate.operations import (
    Attention,
    Products,
    attention_of,
    bytes_per_s,
    named,
    products_of,
)
from orchestrator.contract.messages.measurements import Measurements, Sample
from orchestrator.inventory.profile import Profile

DEEP = 8192
"""Inner size for which `gemm` gives the rate (`plan/cost/machine.py`)."""
USUAL_COPY = 0.9
"""Share of the memory's bandwidth that a copy on a GPU reaches. `memory` of a known GPU is from
training runs, so it changes only by as much as a copy misses this. An assumption."""
NOISY = 0.3
"""Spread of 8 of 10 repetitions, relative to their median, from which numbers are doubtful."""
HEADS = 128
Data = dict[str, Any]


def fit(found: Measurements, base: Profile, source: str) -> Data:
    """The data of a profile file.

    Args:
        base: the profile of the device, or the most similar one.
        source: what the file says about where its numbers come from.
    """
    made = _gpu(found, base) if found.device == "cuda" else _cpu(found, base)
    changed = [path for path in _paths(made) if path != "name"]
    data = {
        "name": base.name,
        "device": found.device,
        "memory_bytes": found.memory_bytes or base.memory_bytes,
        "flops": dict(base.flops),
        "memory_bytes_per_s": base.memory_bytes_per_s,
        "intra_host": _link_data(base, "intra_host"),
        "inter_host": _link_data(base, "inter_host"),
    }
    for key in ("power_w", "sustained"):
        if (value := getattr(base, key)) is not None:
            data[key] = value
    if base.intra_block is not None:
        data["intra_block"] = _link_data(base, "intra_block")
    sources = dict(base.sources) | dict.fromkeys(changed, source)
    merged = _laid_over(data, made)
    merged["sources"] = {path: said for path, said in sources.items() if _has(merged, path)}
    return merged


def nominal(found: Measurements, like: Profile, name: str) -> Profile:
    """The profile of a GPU that no profile describes: what was measured is its nominal rate."""
    samples = found.samples
    flops = {
        kind: best.best
        for kind in ("bfloat16", "float32")
        if (best := products_of(named(samples, "product", kind), 0.0)) is not None
    }
    links = {
        key: replace(getattr(like, key), bytes_per_s=link.bus_bytes_per_s)
        for key, across in (("intra_host", False), ("inter_host", True))
        if (link := link_of(samples, across=across)) is not None
    }
    rate = bytes_per_s(named(samples, "copy"))
    return replace(
        like,
        name=name,
        memory_bytes=found.memory_bytes or like.memory_bytes,
        flops={**like.flops, **flops},
        memory_bytes_per_s=rate / USUAL_COPY if rate else like.memory_bytes_per_s,
        power_w=None,
        sources={},
        **links,
    )


def noise_of(found: Measurements) -> float:
    """Typical spread of 8 of 10 repetitions of a product, relative to their median."""
    spreads = sorted((one.high - one.low) / one.seconds for one in named(found.samples, "product"))
    return spreads[len(spreads) // 2] if spreads else 0.0


def notes_of(found: Measurements) -> Iterator[str]:
    """What a reader of the numbers must know."""
    if (noise := noise_of(found)) > NOISY:
        yield (
            f"the machine was busy: 8 of 10 repetitions of a product differ by {noise:.0%} of their"
            f" median (load {found.load:.1f} on {found.processors} processors before it began);"
            " measure again when it is idle"
        )
    if found.missing:
        yield (
            f"the time did not suffice for {found.missing} of"
            f" {found.missing + len(found.samples)} measurements, whose numbers stay as they were:"
            " raise --budget"
        )
    if found.device == "cpu" and found.ranks_per_host > found.processors:
        yield (
            f"{found.ranks_per_host} ranks shared {found.processors} processors, so a rate is that"
            " of a rank's share"
        )
    if found.ranks_per_host == 1:
        yield "one rank has no link inside a host, so that of the profile stays"
    if found.hosts == 1:
        yield "one host has no link between hosts, so that of the profile stays"
    if found.hot is not None:
        power = f", {found.power_w:.0f} W" if found.power_w else ""
        clock = f", {found.clock_mhz:.0f} MHz" if found.clock_mhz else ""
        first = f"their rate was {found.hot:.0%} of the first{clock}{power}"
        yield f"after seconds of large products {first}"


def _cpu(found: Measurements, base: Profile) -> Data:
    samples, calibration = found.samples, base.calibration
    gap_s = _operation_s(samples) or calibration.gap_s
    made: Data = {"calibration": {"certainty": "calibrated", "gap_s": gap_s}}
    single = products_of(named(samples, "product", "float32"), gap_s)
    half = products_of(named(samples, "product", "bfloat16"), gap_s)
    ways = _attention(samples)
    if single is not None:
        made["calibration"] |= {"depth_half": single.depth_half, "steady": 1.0}
        made["flops"] = {"float32": single.rate}
        made["calibration"]["gemm"] = {"float32": _at_depth(single)}
    # The model takes rates of attention as shares of the bfloat16 peak, whatever the format.
    rates = [half.rate] if half is not None else []
    rates += [way.rate for way in ways.values()]
    if rates and single is not None:
        peak = max(rates)
        made["flops"]["bfloat16"] = peak
        if half is not None:
            shared = half._replace(depth_half=single.depth_half)
            made["calibration"]["gemm"]["bfloat16"] = half.rate / peak * _at_depth(shared)
        made["calibration"]["kernels"] = _kernels(samples, base, ways, peak)
    if (rate := bytes_per_s(named(samples, "activation"))) is not None:
        made["memory_bytes_per_s"] = rate
        made["calibration"]["memory"] = 1.0
    for key, across in (("intra_host", False), ("inter_host", True)):
        if (link := link_of(samples, across=across)) is not None:
            _own_link(made, base, key, link)
    return made


def _own_link(made: Data, base: Profile, key: str, link: LinkRate) -> None:
    """The start of a collective is half of its own, half of its hops: one number of ranks cannot
    tell them apart."""
    kind = getattr(base, key).kind
    made[key] = {
        "kind": kind,
        "bytes_per_s": link.bus_bytes_per_s,
        "latency_s": link.start_s / 2 / max(1, link.ranks - 1),
    }
    own = {"share": 1.0, "half_bytes": 0.0, "base_s": link.start_s / 2}
    made["calibration"].setdefault("links", {})[kind] = own


def _gpu(found: Measurements, base: Profile) -> Data:
    samples, calibration = found.samples, base.calibration
    shares: Data = {"certainty": "calibrated"}
    made: Data = {"calibration": shares}
    for kind in ("bfloat16", "float32"):
        if (best := products_of(named(samples, "product", kind), 0.0)) is not None:
            share = min(1.0, best.best / base.flops[kind])
            shares.setdefault("gemm", {})[kind] = share
            if kind == "bfloat16":
                made["sustained"] = share
    shares["kernels"] = _kernels(samples, base, _attention(samples), base.flops["bfloat16"])
    if (rate := bytes_per_s(named(samples, "copy"))) is not None:
        reached = rate / base.memory_bytes_per_s / USUAL_COPY
        shares["memory"] = calibration.memory * min(1.0, reached)
    if (operation_s := _operation_s(samples)) is not None:
        shares["host_op_s"] = operation_s
    ways = named(samples, "copy to the device") + named(samples, "copy to the host")
    if (rate := bytes_per_s(ways)) is not None:
        shares["host_link"] = rate
    for key, across in (("intra_host", False), ("inter_host", True)):
        link, nominal = link_of(samples, across=across), getattr(base, key)
        if link is not None:
            shares.setdefault("links", {})[nominal.kind] = {
                "share": min(1.0, link.bus_bytes_per_s / nominal.bytes_per_s),
                "half_bytes": 0.0,
                "base_s": max(1e-6, link.start_s - (link.ranks - 1) * nominal.latency_s),
            }
    return made


def _attention(samples: tuple[Sample, ...]) -> dict[str, Attention]:
    """`forward` and `backward`, of heads of 128."""
    found = {}
    for way in ("forward", "backward"):
        wide = [one for one in named(samples, f"attention {way}") if one.size["head"] == HEADS]
        if (fitted := attention_of(wide)) is not None:
            found[way] = fitted
    return found


def _kernels(
    samples: tuple[Sample, ...], base: Profile, ways: Mapping[str, Attention], peak: float
) -> Data:
    """What changes of the kernel that torch takes."""
    kernel: Data = {way: min(1.0, one.rate / peak) for way, one in ways.items()}
    if "forward" in ways:
        kernel["half"] = ways["forward"].half
    narrow = _narrow(samples)
    if narrow is not None:
        kernel["narrow"] = narrow
    return {base.calibration.attention: kernel} if kernel else {}


def _narrow(samples: tuple[Sample, ...]) -> float | None:
    """Speed with heads of 64 relative to heads of 128, on the longest sequences."""
    forward = named(samples, "attention forward")
    longest = max((one.size["tokens"] for one in forward), default=0)
    speed = {
        one.size["head"]: one.size["head"] / one.seconds
        for one in forward
        if one.size["tokens"] == longest
    }
    if set(speed) != {64, HEADS}:
        return None
    return min(1.0, speed[64] / speed[HEADS])


def _operation_s(samples: tuple[Sample, ...]) -> float | None:
    found = named(samples, "small operations")
    return found[0].seconds / found[0].size["operations"] if found else None


def _at_depth(products: Products) -> float:
    return DEEP / (DEEP + products.depth_half)


def _link_data(base: Profile, key: str) -> Data:
    link = getattr(base, key)
    return {"kind": link.kind, "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}


def _laid_over(data: Mapping[str, Any], over: Mapping[str, Any]) -> Data:
    merged = dict(data)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = _laid_over(dict(below or {}), value) if both else value
    return merged


def _paths(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in data.items():
        path = f"{above}.{key}" if above else key
        if isinstance(value, Mapping):
            yield from _paths(value, path)
        else:
            yield path


def _has(data: Mapping[str, Any], path: str) -> bool:
    here: Any = data
    for key in path.split("."):
        if not isinstance(here, Mapping) or key not in here:
            return False
        here = here[key]
    return True
