"""The files of a submission, from which the job itself creates its run directory.

They are needed if the submitting process cannot write to the run directory, or if a user submits
the batch script by hand. They contain no time: `job.at` is 0 until the job starts.
"""

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.codec import decode, encode
from orchestrator.contract.launch import LaunchPlan
from orchestrator.contract.messages.events import JobSubmitted
from orchestrator.contract.read_json import read_json

SUBMISSION = "submission.json"
SUBMITTED = "submitted.json"
SPEC = "spec.yaml"
PLAN = "plan.json"
TRAINER = "trainer.json"
PACKED = ".gz"
"""Ending of the name of a compressed file."""
LINE_CHARS = 96


class Handover(Struct, frozen=True, kw_only=True):
    job: JobSubmitted
    """The journal's first line of this launch."""
    spec: str
    """The text of the run directory's spec.yaml."""
    plan: Mapping[str, Any]
    """Content of plan-<n>.json."""
    trainer: Mapping[str, Any]
    """Content of trainer-<n>.json; empty if the ranks run the user's own program."""
    new: bool = False
    """Rename the directory of an ended run of the same name before this one starts."""
    submitted: Mapping[str, Any] | None = None
    """Content of submitted.json: what the user typed. None if it means nothing on the job's hosts,
    such as a path of the user's own machine."""

    @property
    def launch(self) -> LaunchPlan:
        return self.job.launch


class _Submission(Struct, frozen=True, kw_only=True):
    job: JobSubmitted
    new: bool


def renamed(handover: Handover, run_dir: Path) -> Handover:
    """The same job in another run directory. The directory's name is the job's name."""
    launch, name = handover.launch, run_dir.name
    if str(run_dir) == launch.run_dir:
        return handover
    submitted = handover.submitted
    if submitted is not None:
        submitted = {**submitted, "overrides": [*submitted["overrides"], f"name={name}"]}
    return replace(
        handover,
        job=replace(handover.job, launch=replace(launch, job=name, run_dir=str(run_dir))),
        # The name is the first key of a spec that ndctl wrote, and never needs escapes.
        spec=re.sub(r"\Aname: .*", f"name: '{name}'", handover.spec),
        trainer={**handover.trainer, "out": str(run_dir)} if handover.trainer else {},
        submitted=submitted,
    )


def files_of(handover: Handover) -> dict[str, str]:
    """File name -> text."""
    submission = _Submission(job=handover.job, new=handover.new)
    typed = {} if handover.submitted is None else {SUBMITTED: _json(handover.submitted)}
    return {
        SUBMISSION: _json(encode(submission)),
        SPEC: handover.spec,
        PLAN: _json(handover.plan),
        TRAINER: _json(handover.trainer),
        **typed,
    }


def _json(value: Any) -> str:
    """JSON with lines filled as in a text, because a manifest that holds it is read by people."""
    return "\n".join(_lines(value, "")) + "\n"


def _lines(value: Any, key: str) -> list[str]:
    """The lines of `value`; the first one begins with `key`."""
    flat = key + json.dumps(value, ensure_ascii=False)
    if len(flat) <= LINE_CHARS or not isinstance(value, (Mapping, list, tuple)):
        return [flat]
    if isinstance(value, Mapping):
        keys = (f"{json.dumps(name, ensure_ascii=False)}: " for name in value)
        items, (opening, closing) = [*zip(keys, value.values(), strict=True)], "{}"
    else:
        items, (opening, closing) = [("", item) for item in value], "[]"
    lines: list[str] = []
    room = 0
    for at, (name, item) in enumerate(items):
        parts = _lines(item, name)
        parts[-1] += "," if at < len(items) - 1 else ""
        if len(parts) == 1 and len(parts[0]) < room:
            lines[-1] += f" {parts[0]}"
        else:
            lines += parts
        # What takes several lines has them for itself.
        room = LINE_CHARS - len(lines[-1]) if len(parts) == 1 else 0
    return [key + opening, *(f" {line}" for line in lines), closing]


def packed(files: Mapping[str, str]) -> dict[str, bytes]:
    """The same files, compressed. The same text always gives the same bytes."""
    return {
        f"{name}{PACKED}": gzip.compress(text.encode(), mtime=0) for name, text in files.items()
    }


def handover_from(files: Mapping[str, bytes]) -> Handover:
    """The handover from the files that `files_of` made, compressed or not.

    Raises:
        Invalid: another version of ndctl wrote it.
        KeyError: a file is missing; the key is its name.
    """
    texts = {
        name.removesuffix(PACKED): (
            gzip.decompress(body) if name.endswith(PACKED) else body
        ).decode()
        for name, body in files.items()
    }
    submission: _Submission = decode(_Submission, read_json(texts[SUBMISSION]))
    return Handover(
        job=submission.job,
        spec=texts[SPEC],
        plan=read_json(texts[PLAN]),
        trainer=read_json(texts[TRAINER]),
        new=submission.new,
        submitted=read_json(texts[SUBMITTED]) if SUBMITTED in texts else None,
    )
