"""JSON that programs of ndctl write for each other: journal lines, messages, datagrams; by msgspec.

A value is one member of a union of dataclasses; its class name comes first, under `kind`. The codec
(`codec.py`), which reads what people write, needs 20 times as long, and is the judge all the same:
msgspec passes over keys that it does not know, so its value counts only where it is written as the
very bytes that were read. Anything else, as a line of an older ndctl or damaged text, is for the
codec, which reads it or says what is wrong with it.
"""

import functools
import json
import typing
from typing import Any

import msgspec

from orchestrator.contract import codec
from orchestrator.contract.read_json import read_json

HEAD = b'{"kind":"'
_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """A member of a union of dataclasses as one line of JSON, without a newline."""
    kind: Any = type(value)
    if _decoder(kind) is not None:
        try:
            body = _encoder.encode(value)
        except (TypeError, UnicodeEncodeError, OverflowError):
            pass  # what only Python's own JSON has words for, as half of a surrogate pair in a log
        else:
            return b'%s%s"%s%s' % (HEAD, _name(kind), b"," if len(body) > 2 else b"", body[1:])
    return json.dumps(codec.encode_tagged(value), separators=(",", ":")).encode()


def decode(union: Any, data: bytes) -> Any:
    """The value of `data`, of a member of `union`.

    Raises:
        ValueError: it is none.
    """
    value = unproved(union, data)
    if value is not None and encode(value) == data:
        return value
    return codec.decode(union, read_json(data))


def unproved(union: Any, data: bytes | memoryview) -> Any | None:
    """The value of `data` unless msgspec cannot read it. It counts only where the caller finds that
    it is written as these very bytes."""
    text = bytes(data)
    end = text.find(b'"', len(HEAD))
    decoder = _decoders(union).get(text[len(HEAD) : end]) if text.startswith(HEAD) else None
    if decoder is None:
        return None
    try:
        return decoder.decode(text)
    except (ValueError, RecursionError):
        return None


@functools.cache
def _name(kind: type) -> bytes:
    return kind.__name__.encode()


@functools.cache
def _decoders(union: Any) -> dict[bytes, msgspec.json.Decoder[Any]]:
    found = {_name(kind): _decoder(kind) for kind in typing.get_args(union)}
    return {name: decoder for name, decoder in found.items() if decoder is not None}


@functools.cache
def _decoder(kind: type) -> msgspec.json.Decoder[Any] | None:
    """None for a kind that holds a member of another union, of which msgspec would not write the
    kind."""
    try:
        return msgspec.json.Decoder(kind)
    except TypeError:
        return None
