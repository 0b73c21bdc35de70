"""What was measured, for people and for the file."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.calibrate.operations import PRODUCTS, attention_flops, flops_of
from orchestrator.contract.codec import encode
from orchestrator.contract.messages.measurements import Measurements, Sample
from orchestrator.plan.figures import show_seconds, show_traffic, three_digits
from orchestrator.plan.show.tables import table


def describe_measurements(found: Measurements) -> str:
    ranks = found.hosts * found.ranks_per_host
    head = (
        f"{found.device_name}: {ranks} rank{'s' if ranks > 1 else ''} on {found.hosts}"
        f" host{'s' if found.hosts > 1 else ''}, all at the same time, torch {found.torch}"
    )
    rows = [
        [
            one.what,
            one.kind
            or (
                f"{one.ranks} ranks{', across hosts' if one.across else ''}"
                if one.ranks > 1
                else ""
            ),
            _size(one),
            show_seconds(one.seconds),
            f"{show_seconds(one.low)} to {show_seconds(one.high)}",
            _rate(one),
            str(one.repeats),
        ]
        for one in found.samples
    ]
    titles = ["operation", "of", "size", "median", "8 of 10", "rate", "times"]
    return "\n".join([head, *table(titles, rows, left=3)])


def _size(one: Sample) -> str:
    size = one.size
    if one.what == "product":
        return f"{size['rows']} x {size['columns']} x {size['inner']}"
    if one.what in PRODUCTS:
        return f"{size['sequences']} x {size['tokens']} tokens, {size['heads']} x {size['head']}"
    if "bytes" in size:
        return show_traffic(size["bytes"])
    return f"{size['operations']} operations"


def _rate(one: Sample) -> str:
    if one.what == "product":
        return _tera(flops_of(one) / one.seconds)
    if one.what in PRODUCTS:
        return _tera(attention_flops(one) / one.seconds)
    if "bytes" in one.size:
        return f"{show_traffic(one.size['bytes'] / one.seconds)}/s"
    return f"{show_seconds(one.seconds / one.size['operations'])} each"


def _tera(rate: float) -> str:
    return (
        f"{three_digits(rate / 1e12)} TFLOP/s"
        if rate >= 1e12
        else f"{three_digits(rate / 1e9)} GFLOP/s"
    )


def calibrated_json(
    found: Measurements, profile: Mapping[str, Any], notes: Sequence[str], file: str | None
) -> dict[str, Any]:
    return {
        "file": file,
        "notes": list(notes),
        "profile": dict(profile),
        "measurements": encode(found),
    }


def profile_text(profile: Mapping[str, Any], heading: Iterable[str]) -> str:
    """The profile as a YAML file."""
    import yaml

    head = "".join(f"# {line}\n" for line in heading)
    return head + yaml.safe_dump(dict(profile), sort_keys=False, width=100)
