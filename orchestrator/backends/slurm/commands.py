"""Run Slurm commands with a timeout, and retry while slurmctld does not answer.

All code that runs Slurm commands uses this module.
"""

import re
from collections.abc import Sequence

from msgspec import Struct

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
"""Output of commands while slurmctld is down, restarting, or too busy."""
FOR_GOOD = re.compile(
    r"\binvalid\b(?! time specified)|permitted|permission denied|violates"
    r"|unrecognized option|fatal:",
    re.IGNORECASE,
)
"""Output of `sbatch --test-only` for a job that sbatch would also refuse. `Invalid time specified`,
for a reservation that starts later, is not such: sbatch queues that job."""
NOT_AVAILABLE = re.compile(r"requested node configuration is not available", re.IGNORECASE)
"""Output of `sbatch --test-only` both for a job that no node can ever run, and for one that waits
for nodes that are down or drained. Some versions queue both."""
NO_CLUSTER = re.compile(
    r"could not establish a configuration source|error opening.*slurm\.conf", re.IGNORECASE
)
"""Output of commands on a machine that has them but belongs to no cluster, such as a laptop."""
NO_MUNGE = re.compile(
    r"munge encode failed: (.+?)(?: \(Did you start munged\?\))?$", re.IGNORECASE | re.MULTILINE
)
"""Output of commands on a host whose munged cannot be asked. They do not reach slurmctld."""
UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)


class Slurm(Struct, frozen=True):
    shell: Shell
    clock: Clock

    def ask(
        self, argv: Sequence[str], *, tries: int = 3, answer_s: float | None = None
    ) -> Completed:
        """Run a command, and retry until slurmctld answers. Raises Unanswered if it does not."""
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
                raise _none_here(f"{argv[0]} cannot be run ({done.err.strip()})")
            if done.code and NO_CLUSTER.search(done.err):
                raise _none_here(f"{argv[0]} finds no configuration of a cluster")
            # `scontrol show topology` exits with 0 even if slurmctld is down.
            unanswered = done.code != 0 or not done.out.strip()
            if not (unanswered and AGAIN.search(done.err)):
                return done
            said = done.err.strip().splitlines()[-1]
        raise Unanswered(
            f"Slurm does not answer `{' '.join(argv[:3])}`: {said}",
            fix="check slurmctld with `scontrol ping`, and try again when it is up",
        )

    def told(self, argv: Sequence[str], *, tries: int = 3, answer_s: float | None = None) -> str:
        """The output of a command. Raises BackendError also if Slurm refuses the command."""
        done = self.ask(argv, tries=tries, answer_s=answer_s)
        if done.code != 0:
            raise refusal(argv, done)
        return done.out


def _none_here(why: str) -> BackendError:
    fix = "run this on a login node of the cluster, where `scontrol ping` works"
    return BackendError(f"there is no Slurm here: {why}", fix=fix)


def refusal(argv: Sequence[str], done: Completed) -> BackendError:
    if without := without_munge(done):
        return without
    said = " ".join((done.err or done.out).split())
    return BackendError(f"Slurm refuses `{' '.join(argv[:3])}`: {said}")


def without_munge(done: Completed) -> BackendError | None:
    """The error if a command failed because munged does not run on this host; else None."""
    found = NO_MUNGE.search(done.err)
    if done.code == 0 or found is None:
        return None
    return BackendError(
        f"munged does not answer on this host, and Slurm needs it: {found[1]}",
        fix="start it with `systemctl start munge`, or tell the administrators of this host",
    )
