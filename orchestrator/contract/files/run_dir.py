"""The run directory: where each file of a job lies.

<run root>/<job name>/      mode 0700
  spec.yaml               the spec of the newest launch that came to train, resolved
  spec-<l>.yaml           that of launch <l>: one that the ranks refuse leaves spec.yaml as it is
  submitted.json          the user's own file, and what was said beside it
  plan-<n>.json           mesh, batch, memory, placement; trainer-<n>.json is its trainer config
  journal.jsonl           append-only, one writer; the state of the job is its fold
  state.json              what the journal came to at some place of it; a leader may do without
  metrics.jsonl           a line per optimizer step
  samples.jsonl           the sample ledger: a line per optimizer step
  tokens/                 token files made of data that is none: train.tokens, validation.tokens
  tensorboard/, wandb/    the same, where asked for
  token                   the job's secret, mode 0600
  launch.json             the launch that counts, as the journal has it
  leader.json             where the present leader listens
  fence.json              which leader and which attempt may write
  slurm/launch-<n>/       what Slurm was given, and what tasks said before the agents' own logs
  report.json             in a copy of a job that runs elsewhere: what its leader last told its
                          cluster, where the copy of its journal is older
  logs/agent-<host>.log   what the agent of a host said
  logs/hooks-<host>.log   what the spec's hooks said there
  logs/attempt-<a>/<host>/rank-<r>.log, torchrun.log
  traces/attempt-<a>/     evidence of a hang: rank-<r>.stacks, flight-<r> (what its flight
                          recorder dumped), last-flight-<r> (the end of it, of
                          one that raised), host-<host>.jsonl (states, last lines, probes)
  profiles/attempt-<a>/   rank-<r>.trace.json.gz and, of a GPU, rank-<r>.memory.pickle
  checkpoints/step-<s>/   complete only with its marker
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from orchestrator.contract.files.access import Access

DEFAULT_RUN_ROOT = "ndctl-runs"
FLIGHT_FILES = "flight-"
"""A flight recorder's dump, under the trace directory: this and the rank's number."""
LAST_FILES = "last-flight-"
"""What a rank that ended by an exception had called last. Never taken for the above: recorders of
gloo count an operation that failed as one that is over."""


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    def make(self, access: Access | None = None) -> None:
        """With its folder of logs. Samples, specs and logs are its owner's, but for those whom
        `access` or `chmod` lets in, which stays. Folders above are as the umask has them.

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
        """Held by whoever submits or begins the job. It lies beside the run directory, which
        `--new` puts aside, and stays there: to remove it would let two hold it."""
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
        """What `hooks` of the spec said on `host`."""
        return self.logs / f"hooks-{host}.log"

    def agent_lock(self, host: str) -> Path:
        """Held by the agent of `host` while it lives; the file has its process id."""
        return self.logs / f"agent-{host}.lock"

    def ranks_lock(self, host: str) -> Path:
        """Shared by every process that the agent of `host` started: free means none is left."""
        return self.logs / f"ranks-{host}.lock"

    @property
    def starter_lock(self) -> Path:
        """Held by the process that starts steps of the job in an allocation of its user's own."""
        return self.logs / "starter.lock"

    @property
    def requeue_lock(self) -> Path:
        """Held by the agent whose turn it is to ask for a requeue, once the leader is gone."""
        return self.logs / "requeue.lock"

    def attempt_logs(self, attempt: int, host: str) -> Path:
        return self.logs / f"attempt-{attempt}" / host

    def traces(self, attempt: int) -> Path:
        return self.path / "traces" / f"attempt-{attempt}"

    def profiles(self, attempt: int) -> Path:
        return self.path / "profiles" / f"attempt-{attempt}"
