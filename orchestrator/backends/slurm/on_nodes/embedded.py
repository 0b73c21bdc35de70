"""A handover as text in a batch script: the spec as a person reads it, all else packed. Pure.

The packed part is lines of base64 of gzip of JSON, which `base64 -d | gunzip` shows. The plan was
made for this very spec: a spec that was edited in the script is refused.
"""

import base64
import gzip
import json
import textwrap
from hashlib import sha256

from orchestrator.contract.codec import Invalid
from orchestrator.contract.read_json import read_json
from orchestrator.contract.submission_payload import SPEC, Handover, files_of, handover_from
from orchestrator.errors import SpecError

PACKED = "# Plan, trainer configuration and submission of that spec, packed (base64 -d | gunzip)."
DIGEST = "spec.sha256"
WIDTH = 100


def to_text(handover: Handover) -> str:
    """The same handover always makes the same text."""
    files = files_of(handover)
    spec = files.pop(SPEC).rstrip("\n") + "\n"
    body = json.dumps({DIGEST: _digest(spec), **files}, ensure_ascii=False)
    packed = base64.b64encode(gzip.compress(body.encode(), mtime=0)).decode()
    return "\n".join([spec + PACKED, *textwrap.wrap(packed, WIDTH)])


def from_text(text: str) -> Handover:
    """What `to_text` made. Raises SpecError where it is not that any more."""
    spec, _, packed = text.rpartition(f"\n{PACKED}\n")
    try:
        files = read_json(gzip.decompress(base64.b64decode(packed)))
        digest = files.pop(DIGEST)
        spec = f"{spec}\n"
        handover = handover_from({SPEC: spec.encode()} | {k: v.encode() for k, v in files.items()})
    except (ValueError, OSError, EOFError, KeyError, AttributeError, Invalid) as exc:
        raise SpecError(
            f"the job that this script carries cannot be read: {exc!r}",
            fix="make the script again with `ndctl render SPEC`, with this version of ndctl",
        ) from exc
    if digest != _digest(spec):
        raise SpecError(
            "the spec in this script was edited: the plan and the trainer's configuration beside it"
            " were made for another one",
            fix="edit the file that it came from, and make the script again with `ndctl render`;"
            " the #SBATCH lines may be edited",
        )
    return handover


def _digest(spec: str) -> str:
    return sha256(spec.encode()).hexdigest()
