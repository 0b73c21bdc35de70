"""Stand-in for Kubernetes' Job controller: which pods one indexed Job needs, and how it ends.

It creates a pod again at once. The controller waits 10 s after a failed pod, twice as long after
each further one, and at most 10 minutes; with `backoffLimitPerIndex` it counts per index.
"""

from collections.abc import Collection

from tests.kubernetes.standins.api import Object
from tests.kubernetes.standins.operator import phase

INDEX = "batch.kubernetes.io/job-completion-index"
BACKOFF_LIMIT = 6
COMPLETE = "Complete"


def outcome(spec: Object, pods: Collection[Object]) -> str:
    """`Complete`, the reason why the Job fails, or "" while it goes on."""
    verdicts = [_verdict(spec, pod) for pod in pods if phase(pod) == "Failed"]
    if "FailJob" in verdicts:
        return "PodFailurePolicy"
    if verdicts.count("Count") > spec.get("backoffLimit", BACKOFF_LIMIT):
        return "BackoffLimitExceeded"
    done = {index_of(pod) for pod in pods if phase(pod) == "Succeeded"}
    if len(done) == _completions(spec) or _is_success(spec, done):
        return COMPLETE
    return ""


def missing(spec: Object, pods: Collection[Object]) -> list[int]:
    """Indexes that need a pod. With a podFailurePolicy, a pod that is being deleted is replaced
    only when it has ended."""
    waits = "podFailurePolicy" in spec or spec.get("podReplacementPolicy") == "Failed"
    kept = {
        index_of(pod)
        for pod in pods
        if phase(pod) == "Succeeded"
        or is_active(pod)
        or (waits and "deletionTimestamp" in pod["metadata"] and phase(pod) != "Failed")
    }
    return sorted(set(range(_completions(spec))) - kept)


def is_active(pod: Object) -> bool:
    return not has_ended(pod) and "deletionTimestamp" not in pod["metadata"]


def has_ended(pod: Object) -> bool:
    return phase(pod) in ("Succeeded", "Failed")


def index_of(pod: Object) -> int:
    return int(pod["metadata"]["labels"][INDEX])


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return is_active(pod) and any(
        each["type"] == "Ready" and each["status"] == "True" for each in conditions
    )


def _completions(spec: Object) -> int:
    return int(spec.get("completions") or spec.get("parallelism") or 1)


def _is_success(spec: Object, done: set[int]) -> bool:
    for rule in (spec.get("successPolicy") or {}).get("rules", ()):
        wanted = _indexes(rule["succeededIndexes"]) if "succeededIndexes" in rule else None
        counted = done if wanted is None else done & wanted
        if len(counted) >= rule.get("succeededCount", len(wanted or ()) or _completions(spec)):
            return True
    return False


def _indexes(text: str) -> set[int]:
    """Indexes of a list such as `0,2-4`."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _verdict(spec: Object, pod: Object) -> str:
    """The action of the podFailurePolicy for a failed pod."""
    status = pod["status"]
    for rule in (spec.get("podFailurePolicy") or {}).get("rules", ()):
        held = {it["type"] for it in status.get("conditions", ()) if it["status"] == "True"}
        if held & {it["type"] for it in rule.get("onPodConditions", ())}:
            return str(rule["action"])
        if codes := rule.get("onExitCodes"):
            ended = {
                it["state"]["terminated"]["exitCode"]
                for it in status.get("containerStatuses", ())
                if "terminated" in it["state"] and codes.get("containerName") in (None, it["name"])
            } - {0}
            among = ended & set(codes["values"])
            if among if codes["operator"] == "In" else ended - set(codes["values"]):
                return str(rule["action"])
    return "Count"
