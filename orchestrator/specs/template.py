"""A first spec with comments, from the answers to three questions: `ndctl init`."""

import json
import re
import shlex
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.spec.job_spec import kubernetes_name
from orchestrator.contract.spec.model_presets import PRESETS


class Answers(Struct, frozen=True, kw_only=True):
    train: str
    """A Python script, a preset, a folder of Hugging Face, or a hub id."""
    data: str = ""
    """A glob of files, or the arguments of the script."""
    backend: str = "local"
    hosts: int = 1
    gpus_per_host: int = 1
    name: str = ""
    """Empty: from `train`."""

    @property
    def is_script(self) -> bool:
        return self.train.endswith(".py")


def spec_text(answers: Answers) -> str:
    """The spec as YAML. `ndctl validate` accepts it if the files that it names exist."""
    parts = [_head(answers), _run(answers) if answers.is_script else _training(answers)]
    parts.append(_cluster(answers))
    parts.append(_checkpoint(answers))
    return "\n".join(parts)


def _head(answers: Answers) -> str:
    return f"""\
# A job of ndctl. `ndctl explain KEY` says what a key means, `ndctl validate FILE` checks this file,
# `ndctl submit FILE --follow` starts it. Lines that begin with # are examples.
name: {_name(answers)}
"""


def _name(answers: Answers) -> str:
    stem = answers.name or re.sub(r"[^A-Za-z0-9_-]+", "-", Path(answers.train).stem).strip("-_")
    stem = stem[:40] or "job"
    return kubernetes_name(stem) if answers.backend == "kubernetes" else stem


def _run(answers: Answers) -> str:
    args = ", ".join(_quoted(word) for word in shlex.split(answers.data))
    return f"""\
run:
  script: {_quoted(answers.train)}     # each rank runs it, with the variables of torchrun
  args: [{args}]
  # env: {{TOKENIZERS_PARALLELISM: "false"}}
  # metrics: {{step: 'step (\\d+)', loss: 'loss ([\\d.]+)'}}   # progress, from its log
"""


def _training(answers: Answers) -> str:
    preset = answers.train in PRESETS
    model = "preset" if preset else "path"
    value = _quoted(answers.train)
    tokenizer = "bytes" if preset else value
    # A batch that each rank can share.
    batch = 8 * answers.hosts * answers.gpus_per_host
    weights = "" if preset else f"  # weights: {value}      # start from these, not from new ones\n"
    return f"""\
model:
  {model}: {value}
{weights}data:
  files: {_quoted(answers.data)}
  tokenizer: {tokenizer}          # bytes, a folder, or a hub id in the local cache
  sequence_length: 256
  # validation: {{fraction: 0.01}}
train:
  steps: 100
  global_batch_size: {batch}      # sequences per step, whatever the number of hosts
  optimizer: {{lr: 3.0e-4}}
  schedule: {{kind: cosine, warmup_steps: 10}}
# parallel: {{tp: 2}}             # what is not fixed, the planner chooses: `ndctl plan FILE`
"""


ON_BACKEND = {
    "local": "",
    "slurm": """\
  slurm:
    # partition: gpu
    # account: my-account
    time: 1-00:00:00              # of one allocation; the job is requeued until it is done
""",
    "kubernetes": """\
  kubernetes:
    kind: pytorchjob              # or jobset, or trainjob
    # namespace: training
    # image: ghcr.io/you/ndctl:0.1    # needed to submit: an image with ndctl (manifests/image/)
    # runs: {claim: ndctl-runs}       # needed to submit: a volume that all pods can write
""",
}


def _cluster(answers: Answers) -> str:
    return f"""\
cluster:
  backend: {answers.backend}
  hosts: {answers.hosts}
  gpus_per_host: {answers.gpus_per_host}              # ranks per host; without GPUs on CPUs
  # spare_hosts: 1                # replace a host that fails
{ON_BACKEND[answers.backend]}"""


def _checkpoint(answers: Answers) -> str:
    if answers.is_script:
        return ""
    return "checkpoint: {every_steps: 50}\n"


def _quoted(text: str) -> str:
    """A string of YAML."""
    return json.dumps(text, ensure_ascii=False)
