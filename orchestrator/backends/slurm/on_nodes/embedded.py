"""The job as text in a batch script: the spec as YAML, the rest packed. Pure.

The packed part is JSON in gzip in base64; `base64 -d | gunzip` shows it. A spec that was edited in
the script is refused, because the plan was made for the original spec.
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
    """The text is deterministic."""
    files = files_of(handover)
    spec = files.pop(SPEC).rstrip("\n") + "\n"
    body = json.dumps({DIGEST: _digest(spec), **files}, ensure_ascii=False)
    packed = base64.b64encode(gzip.compress(body.encode(), mtime=0)).decode()
    return "\n".join([spec + PACKED, *textwrap.wrap(packed, WIDTH)])


def from_text(text: str) -> Handover:
    """Parse the text of `to_text`. Raises SpecError if it was edited."""
    spec, _, packed = text.rpartition(f"\n{PACKED}\n")
    try:
        files = read_json(gzip.decompress(base64.b64decode(packed)))
        digest = files.pop(DIGEST)
        spec = f"{spec}\n"
        handover = handover_from({SPEC: spec.encode()} | {k: v.encode() for k, v in files.items()})
    except (ValueError, OSError, EOFError, KeyError, AttributeError, Invalid) as exc:
        raise SpecError(
            f"cannot read the job in this script: {exc!r}",
            fix="render the script again with this version of ndctl: `ndctl render SPEC`",
        ) from exc
    if digest != _digest(spec):
        raise SpecError(
            "the spec in this script was edited, but the plan and the trainer configuration in it"
            " were made for the original spec",
            fix="edit the spec file and render the script again with `ndctl render`; only the"
            " #SBATCH lines may be edited",
        )
    return handover


def _digest(spec: str) -> str:
    return sha256(spec.encode()).hexdigest()
