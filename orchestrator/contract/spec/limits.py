"""Limits that an `Annotated` type puts on its values. Each can describe itself."""

import re
from typing import Any

from msgspec import Struct


class AtLeast(Struct, frozen=True):
    low: float

    def __str__(self) -> str:
        return f"at least {self.low}"

    @property
    def advice(self) -> str:
        return f"{self.low} or more"

    def admits(self, value: Any) -> bool:
        return bool(value >= self.low)


class AtMost(Struct, frozen=True):
    high: float

    def __str__(self) -> str:
        return f"at most {self.high}"

    @property
    def advice(self) -> str:
        return f"{self.high} or less"

    def admits(self, value: Any) -> bool:
        return bool(value <= self.high)


class Above(Struct, frozen=True):
    low: float

    def __str__(self) -> str:
        return f"above {self.low}"

    @property
    def advice(self) -> str:
        return f"a number above {self.low}"

    def admits(self, value: Any) -> bool:
        return bool(value > self.low)


class Matches(Struct, frozen=True):
    pattern: str
    words: str
    """The pattern in words, as the end of "must be …"."""
    example: str = ""

    def __str__(self) -> str:
        return self.words

    @property
    def advice(self) -> str:
        return f"something like {self.example}" if self.example else self.words

    def admits(self, value: Any) -> bool:
        return re.fullmatch(self.pattern, value) is not None


class OneOf(Struct, frozen=True):
    """For names that come from data. Names that are part of the language are a `Literal`."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"one of {', '.join(self.names)}"

    @property
    def advice(self) -> str:
        return str(self)

    def admits(self, value: Any) -> bool:
        return value in self.names


Limit = AtLeast | AtMost | Above | Matches | OneOf
