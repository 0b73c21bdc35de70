"""The run directory: where each file of a job is.

<run root>/<job name>/      mode 0700
  spec.yaml               resolved spec of the newest launch that started to train
  spec-<l>.yaml           spec of launch <l>; if the ranks refuse it, spec.yaml stays as it is
  submitted.json          the user's own spec file and the command line options
  plan-<n>.json           mesh, batch, memory, placement; trainer-<n>.json is its trainer config
  journal.jsonl           append-only, one writer; folding it gives the state of the job
  state.json              snapshot: the fold of the journal up to some line; optional
  metrics.jsonl           a line per optimizer step
  capture-<l>/            copy of the user's program for launch <l> (Slurm)
  imports.json            modules that a user's script imported, so that hosts import them once
  samples.jsonl           the sample ledger: a line per optimizer step
  tokens/                 token files made from text data: train.tokens, validation.tokens
  tensorboard/, wandb/    metrics for these tools, if the spec asks for them
  token                   the job's secret, mode 0600
  launch.json             the current launch, as in the journal
  leader.json             where the current leader listens
  fence.json              which leader and which attempt may write
  slurm/launch-<n>/       what was submitted to Slurm, and output of tasks before the agents' logs
  report.json             in a copy of a job that runs elsewhere: the last report of its leader to
                          the cluster, used if the copy of the journal is older
  logs/agent-<host>.log   log of the agent of a host
  logs/hooks-<host>.log   output of the spec's hooks on the host
  logs/attempt-<a>/<host>/rank-<r>.log, torchrun.log
  traces/attempt-<a>/     evidence of a hang: rank-<r>.stacks, flight-<r> (dump of the flight
                          recorder), last-flight-<r> (its last entries, of a rank that
                          raised), host-<host>.jsonl (states, last lines, probes)
  profiles/attempt-<a>/   rank-<r>.trace.json.gz and, on a GPU, rank-<r>.memory.pickle;
                          rank-<r>.oom.pickle after the GPU ran out of memory
  checkpoints/step-<s>/   complete only with its marker
"""

import contextlib
from pathlib import Path

from msgspec import Struct

from orchestrator.contract.files.access import Access

DEFAULT_RUN_ROOT = "ndctl-runs"
FLIGHT_FILES = "flight-"
"""Dump of a flight recorder in the trace directory: this and the rank's number."""
LAST_FILES = "last-flight-"
"""Last calls of a rank that ended by an exception. They are kept apart from dumps, because gloo's
recorder marks a failed operation as completed."""


class RunDir(Struct, frozen=True):
    path: Path

    def make(self, access: Access | None = None) -> None:
        """Create the directory and its folder of logs. Samples, specs and logs are readable by
        their owner, and by others only if `access` or a chmod by the user allows it. Folders above
        follow the umask.

        Raises OSError.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        if access is not None:
            access.apply(self.path)
        self.logs.mkdir(exist_ok=True)

    @property
    def submission_lock(self) -> Path:
        """Held by the process that submits or starts the job. The file is beside the run directory,
        because `--new` renames that one, and is never removed: a process that waits on a removed
        lock file and one that creates it again would both hold the lock."""
        return self.path.with_name(f".{self.path.name}.submitting")

    @property
    def spec(self) -> Path:
        return self.path / "spec.yaml"

    def spec_of(self, launch: int) -> Path:
        return self.path / f"spec-{launch}.yaml"

    @property
    def submitted(self) -> Path:
        return self.path / "submitted.json"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def learned_imports(self) -> Path:
        return self.path / "imports.json"

    def capture(self, launch: int) -> Path:
        return self.path / f"capture-{launch}"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def token(self) -> Path:
        return self.path / "token"

    @property
    def launch(self) -> Path:
        return self.path / "launch.json"

    @property
    def leader(self) -> Path:
        return self.path / "leader.json"

    @property
    def fence(self) -> Path:
        return self.path / "fence.json"

    def end_unconfirmed(self, launch: int) -> Path:
        """Exists while the job has ended and its scheduler, which may still have the launch, was
        not reached to end that."""
        return self.path / f"end-unconfirmed-{launch}"

    @property
    def trainer_lock(self) -> Path:
        """Held by rank 0 under plain torchrun, where no fence stops a second job."""
        return self.path / "trainer.lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def plan(self, number: int) -> Path:
        return self.path / f"plan-{number}.json"

    def trainer_config(self, number: int) -> Path:
        return self.path / f"trainer-{number}.json"

    @property
    def slurm(self) -> Path:
        return self.path / "slurm"

    def agent_log(self, host: str) -> Path:
        return self.logs / f"agent-{host}.log"

    def hook_log(self, host: str) -> Path:
        """Output of the spec's `hooks` on `host`."""
        return self.logs / f"hooks-{host}.log"

    def agent_lock(self, host: str) -> Path:
        """Held by the agent of `host` while it lives. The file contains its process id."""
        return self.logs / f"agent-{host}.lock"

    def ranks_lock(self, host: str) -> Path:
        """Shared by every process that the agent of `host` started. If it is free, none is left."""
        return self.logs / f"ranks-{host}.lock"

    @property
    def starter_lock(self) -> Path:
        """Held by the process that starts job steps inside a user's own allocation."""
        return self.logs / "starter.lock"

    @property
    def requeue_lock(self) -> Path:
        """Held by the agent that asks for a requeue after the leader is lost."""
        return self.logs / "requeue.lock"

    def attempt_logs(self, attempt: int, host: str) -> Path:
        return self.logs / f"attempt-{attempt}" / host

    def traces(self, attempt: int) -> Path:
        return self.path / "traces" / f"attempt-{attempt}"

    def profiles(self, attempt: int) -> Path:
        return self.path / "profiles" / f"attempt-{attempt}"
