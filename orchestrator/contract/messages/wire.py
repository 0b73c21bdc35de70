"""JSON that programs of ndctl write for each other: journal lines, messages, datagrams; by msgspec.

A value is one member of a union of structs. Its class name comes first, under `kind`.

msgspec reads about 20 times as fast as the codec (`codec.py`), which reads what people write.
msgspec ignores keys that it does not know, so its value is used only if encoding it again gives
the bytes that were read, and if the value keeps the `Annotated` limits of its type. All other text,
such as a line of an older ndctl or damaged text, goes to the codec, which reads it or reports what
is wrong with it.
"""

import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Union

import msgspec

from orchestrator.contract import codec
from orchestrator.contract.read_json import read_json

HEAD = b'{"kind":"'
Check = Callable[[Any], bool]
"""Whether a value keeps the limits of its type."""
_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """A member of a union of structs as one line of JSON, without a newline."""
    kind: Any = type(value)
    try:
        body = _encoder.encode(value)
    except (TypeError, UnicodeEncodeError, OverflowError):
        # Only Python's own JSON can write this value, such as half of a surrogate pair in a log.
        return json.dumps(codec.encode_tagged(value), separators=(",", ":")).encode()
    # `body` is "{}" if the kind has no fields: then no comma follows the kind.
    return b'%s%s"%s%s' % (HEAD, _name(kind), b"," if len(body) > 2 else b"", body[1:])


class Decoder:
    """Reads the members of one union."""

    def __init__(self, union: Any) -> None:
        self.union = union

    def decode(self, data: bytes) -> Any:
        """The member of the union that `data` holds.

        Raises:
            ValueError: `data` is not the JSON of a member, breaks a limit, or has a key twice.
        """
        value = self.decode_exact(data)
        if value is not None:
            return value
        return codec.decode(self.union, read_json(data, unique_keys=True))

    def decode_exact(self, data: bytes) -> Any | None:
        """The value that `encode` writes as `data`; None if there is none or it breaks a limit."""
        end = data.find(b'"', len(HEAD))
        found = self._kinds.get(data[len(HEAD) : end]) if data.startswith(HEAD) else None
        if found is None:
            return None
        decoder, keeps_limits = found
        try:
            value = decoder.decode(data)
        except (ValueError, RecursionError):
            return None
        if keeps_limits is not None and not keeps_limits(value):
            return None
        return value if encode(value) == data else None

    @functools.cached_property
    def _kinds(self) -> dict[bytes, tuple[msgspec.json.Decoder[Any], Check | None]]:
        """Name of a member -> how it is read. Made when it is used: msgspec then looks at each
        class, which takes milliseconds."""
        return {
            _name(kind): (msgspec.json.Decoder(kind), limit_check(kind))
            for kind in typing.get_args(self.union)
        }


@functools.cache
def _name(kind: type) -> bytes:
    return kind.__name__.encode()


@functools.cache
def limit_check(kind: Any) -> Check | None:
    """The check of all `Annotated` limits in `kind`; None if it has no limit.

    msgspec has limits of its own (`msgspec.Meta`). They are not used, because the codec checks what
    people write, and its limits also say how to fix a value.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        limits = args[1:]
        return lambda value: all(limit.admits(value) for limit in limits)
    if origin in (Union, types.UnionType):
        return _union_check(args)
    if origin is tuple:
        return _items_check(args[0], lambda value: value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _items_check(args[1], lambda value: value.values())
    if codec.is_struct(kind):
        fields = codec.fields_of(kind).values()
        checks = [(name, check) for name, of, _ in fields if (check := limit_check(of))]
        return _fields_check(checks) if checks else None
    return None


def _union_check(kinds: tuple[Any, ...]) -> Check | None:
    """msgspec reads unions of scalars and at most one struct, so the type tells the member."""
    checks = [(_bare_type(kind), check) for kind in kinds if (check := limit_check(kind))]
    if not checks:
        return None
    return lambda value: all(
        check(value)
        for of, check in checks
        if isinstance(value, of) and not isinstance(value, bool)  # a bool is an int in Python
    )


def _bare_type(kind: Any) -> type:
    bare = typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind
    bare = typing.get_origin(bare) or bare
    return typing.cast(type, bare)


def _items_check(item: Any, items_of: Callable[[Any], Any]) -> Check | None:
    check = limit_check(item)
    return None if check is None else lambda value: all(map(check, items_of(value)))


def _fields_check(checks: list[tuple[str, Check]]) -> Check:
    return lambda value: all(check(getattr(value, name)) for name, check in checks)
