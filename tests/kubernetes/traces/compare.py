"""Merges several recordings of a scenario into one trace, and compares a recording with a trace.

An operator does not act the same way each time: Kubeflow's training operator goes through the kinds
of replicas in random order. A trace therefore holds what every recording had and what only some had.
"""

from collections.abc import Collection, Sequence
from typing import Any

SEEN = ("conditions passed through", "events")
"""Of these, all that each recording has has to be seen, and nothing that none has. Of everything
else: what one of the recordings has."""
OF_AN_END = ("Normal ExitedWithCode: ", "Warning PyTorchJobRestarting: job ")
"""What the operator tells when it finds that a pod has ended."""
Step = dict[str, Any]
"""What came of one act."""


def merged(recordings: Sequence[Sequence[Step]]) -> list[Step]:
    """Step by step."""
    steps = [_merged(each) for each in zip(*recordings, strict=True)]
    told: set[str] = set()
    for step in steps:
        _excuse(step["events"], told)
        told |= {*step["events"]["always"], *step["events"]["sometimes"]}
    return steps


def _excuse(events: dict[str, list[str]], told: Collection[str]) -> None:
    """What is told once more depends on how often the operator looks; and a pod that another
    deletes may be gone before it looks at its end."""
    deletes = any(" SuccessfulDeletePod: " in it for it in events["always"])
    excused = [
        it for it in events["always"] if it in told or (not deletes and it.startswith(OF_AN_END))
    ]
    events["always"] = [it for it in events["always"] if it not in excused]
    events["sometimes"] = sorted({*events["sometimes"], *excused})


def _merged(steps: Sequence[Step]) -> Step:
    one: Step = {"act": steps[0]["act"]}
    for word in steps[0]:
        found = [step[word] for step in steps]
        if word in SEEN:
            always, ever = set.intersection(*map(set, found)), set.union(*map(set, found))
            one[word] = {"always": sorted(always), "sometimes": sorted(ever - always)}
        elif word != "act":
            one[word] = [it for at, it in enumerate(found) if it not in found[:at]]
    return one


def differences(trace: Sequence[Step], steps: Sequence[Step]) -> list[str]:
    """Each a line: at which act, in what, and how."""
    return [
        f"{step['act']}: {word}: {said}"
        for recorded, step in zip(trace, steps, strict=True)
        for word in recorded
        for said in _differences(word, recorded[word], step[word])
    ]


def _differences(word: str, recorded: Any, found: Any) -> list[str]:
    if word == "act":
        return [] if recorded == found else [f"recorded was {recorded}"]
    if word not in SEEN:
        if found in recorded:
            return []
        return [" or ".join(_unlike(each, found) for each in recorded)]
    missing = sorted(set(recorded["always"]) - set(found))
    strange = sorted(set(found) - set(recorded["always"]) - set(recorded["sometimes"]))
    return [*(f"without {it!r}" for it in missing), *(f"has {it!r}" for it in strange)]


def _unlike(recorded: Any, found: Any, where: str = "") -> str:
    """The parts that differ."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        keys = sorted({*recorded, *found})
        parts = [
            _unlike(recorded.get(key), found.get(key), f"{where}.{key}")
            for key in keys
            if recorded.get(key) != found.get(key)
        ]
        return ", ".join(parts)
    return f"{where} is {found!r}, recorded was {recorded!r}"
