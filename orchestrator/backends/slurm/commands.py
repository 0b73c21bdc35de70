"""Slurm's commands: with a time limit, asked again while slurmctld does not answer.

Whoever asks Slurm anything, asks it here: the backend, the reader of its nodes, the doctor.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.errors import BackendError, Unanswered
from orchestrator.seams import Clock, Completed, Shell

ANSWER_S = 30.0
RETRY_S = 2.0
AGAIN = re.compile(
    r"unable to contact slurm controller|socket timed out|connection refused|zero bytes were"
    r"|backup controller|resource temporarily unavailable|transport endpoint|unable to connect"
    r"|communication (connection )?failure|slurmctld.*(not respond|down)|timed out"
    r"|unexpected message received",
    re.IGNORECASE,
)
"""What commands print when slurmctld is down, starts again, or is too busy."""
FOR_GOOD = re.compile(
    r"\binvalid\b|permitted|permission denied|violates|unrecognized option|fatal:", re.IGNORECASE
)
"""What `sbatch --test-only` prints of a job that sbatch refuses, too."""
NOT_AVAILABLE = re.compile(r"requested node configuration is not available", re.IGNORECASE)
"""What it prints of a job that no node ever fits, and also of one that waits for nodes which are
down or drained now: some versions queue both."""
UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Slurm:
    shell: Shell
    clock: Clock
    instead: str = ""
    """What else there is to do where Slurm cannot be asked; added to each fix."""

    def ask(
        self, argv: Sequence[str], *, tries: int = 3, answer_s: float | None = None
    ) -> Completed:
        """Run a command until slurmctld answers. Raises Unanswered when it does not."""
        said = ""
        for again in range(tries):
            if again:
                self.clock.sleep(RETRY_S)
            try:
                done = self.shell(argv, timeout=answer_s or ANSWER_S)
            except TimeoutError as exc:
                said = str(exc)
                continue
            if done.code == 127:
                raise BackendError(
                    f"there is no Slurm here: {argv[0]} cannot be run ({done.err.strip()})",
                    fix="type this on a login node of the cluster, where `scontrol ping` answers"
                    + self.instead,
                )
            # `scontrol show topology` has exit code 0 even then.
            unanswered = done.code != 0 or not done.out.strip()
            if not (unanswered and AGAIN.search(done.err)):
                return done
            said = done.err.strip().splitlines()[-1]
        raise Unanswered(
            f"Slurm does not answer `{' '.join(argv[:3])}`: {said}",
            fix=f"`scontrol ping` says whether slurmctld is up; try again when it is{self.instead}",
        )

    def told(self, argv: Sequence[str], *, tries: int = 3, answer_s: float | None = None) -> str:
        """What the command printed. Raises BackendError when Slurm refuses it as well."""
        done = self.ask(argv, tries=tries, answer_s=answer_s)
        if done.code != 0:
            raise refusal(argv, done)
        return done.out


def refusal(argv: Sequence[str], done: Completed) -> BackendError:
    said = " ".join((done.err or done.out).split())
    return BackendError(f"Slurm refuses `{' '.join(argv[:3])}`: {said}")
