"""Which labels a label selector of Kubernetes asks for. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct


class Requirement(Struct, frozen=True):
    """What a selector asks of one label."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def admits(self, labels: Mapping[str, str]) -> bool:
        """Whether an object with `labels` has it. An absent label is in no list of values."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "DoesNotExist":
                return self.key not in labels
            case _:
                return self.key in labels


def requirements(selector: Any) -> Iterator[Requirement]:
    """The requirements of a selector; an object must meet all of them."""
    if not isinstance(selector, Mapping):
        return
    exact, more = selector.get("matchLabels"), selector.get("matchExpressions")
    for key, value in exact.items() if isinstance(exact, Mapping) else ():
        yield Requirement(str(key), "In", (str(value),))
    for one in more if isinstance(more, list) else ():
        if isinstance(one, Mapping):
            values = one.get("values")
            given = tuple(map(str, values)) if isinstance(values, list) else ()
            yield Requirement(str(one.get("key")), str(one.get("operator")), given)
