"""Merges several recordings of a scenario into one trace, and compares a recording with a trace.

An operator does not act the same way each time: Kubeflow's training operator goes through the
kinds of replicas in random order. A trace therefore holds what every recording had, and what only
some had.
"""

from collections.abc import Collection, Sequence
from typing import Any

SET_PARTS = ("conditions passed through", "events")
"""Parts that are sets. A recording must have every item that all earlier recordings have, and no
item that none of them has. Any other part must equal that of one earlier recording."""
POD_END_EVENTS = ("Normal ExitedWithCode: ", "Warning PyTorchJobRestarting: job ")
"""Events that the operator posts when it sees that a pod has ended."""
Step = dict[str, Any]
"""The result of one action."""


def merged(recordings: Sequence[Sequence[Step]]) -> list[Step]:
    """One trace of several recordings, step by step."""
    steps = [_merged(each) for each in zip(*recordings, strict=True)]
    posted_before: set[str] = set()
    for step in steps:
        _allow_missing(step["events"], posted_before)
        posted_before |= {*step["events"]["always"], *step["events"]["sometimes"]}
    return steps


def _allow_missing(events: dict[str, list[str]], posted_before: Collection[str]) -> None:
    """Moves events to `sometimes` that depend on when the operator looks.

    It may repeat an event that it posted at an earlier step. And a pod that someone else deletes
    may be gone before the operator sees that it ended.
    """
    deletes = any(" SuccessfulDeletePod: " in it for it in events["always"])
    excused = [
        it
        for it in events["always"]
        if it in posted_before or (not deletes and it.startswith(POD_END_EVENTS))
    ]
    events["always"] = [it for it in events["always"] if it not in excused]
    events["sometimes"] = sorted({*events["sometimes"], *excused})


def _merged(steps: Sequence[Step]) -> Step:
    one: Step = {"action": steps[0]["action"]}
    for part in steps[0]:
        found = [step[part] for step in steps]
        if part in SET_PARTS:
            always, ever = set.intersection(*map(set, found)), set.union(*map(set, found))
            one[part] = {"always": sorted(always), "sometimes": sorted(ever - always)}
        elif part != "action":
            one[part] = [it for at, it in enumerate(found) if it not in found[:at]]
    return one


def differences(trace: Sequence[Step], steps: Sequence[Step]) -> list[str]:
    """One line for each difference: the action, the part, and what differs."""
    return [
        f"{step['action']}: {part}: {difference}"
        for recorded, step in zip(map(_with_missed_conditions, trace), steps, strict=True)
        for part in recorded
        for difference in _differences(part, recorded[part], step[part])
    ]


def _with_missed_conditions(recorded: Step) -> Step:
    """`recorded` with the conditions that its events show. A recording may miss a condition that
    lasted for a moment, but the operator posts an event with the same text."""
    conditions, events = (recorded[part] for part in SET_PARTS)
    posted = [it.partition(" ")[2] for it in (*events["always"], *events["sometimes"])]
    shown = [f"Restarting True {text}" for text in posted if "Restarting: " in text]
    more = {**conditions, "sometimes": [*conditions["sometimes"], *shown]}
    return {**recorded, SET_PARTS[0]: more}


def _differences(part: str, recorded: Any, found: Any) -> list[str]:
    if part == "action":
        return [] if recorded == found else [f"recorded was {recorded}"]
    if part not in SET_PARTS:
        if found in recorded:
            return []
        return [" or ".join(_describe_difference(each, found) for each in recorded)]
    missing = sorted(set(recorded["always"]) - set(found))
    unexpected = sorted(set(found) - set(recorded["always"]) - set(recorded["sometimes"]))
    return [*(f"without {it!r}" for it in missing), *(f"has {it!r}" for it in unexpected)]


def _describe_difference(recorded: Any, found: Any, where: str = "") -> str:
    """Path and value of each leaf that differs."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        keys = sorted({*recorded, *found})
        parts = [
            _describe_difference(recorded.get(key), found.get(key), f"{where}.{key}")
            for key in keys
            if recorded.get(key) != found.get(key)
        ]
        return ", ".join(parts)
    return f"{where} is {found!r}, recorded was {recorded!r}"
