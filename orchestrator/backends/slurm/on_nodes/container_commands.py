"""Check that Slurm's commands work in the container, where the leader needs them."""

import logging
import re

from orchestrator.errors import CannotLead
from orchestrator.seams import Shell

log = logging.getLogger(__name__)

NEEDED = (("scontrol", "ping"), ("srun", "--version"))
ANSWER_S = 75.0
"""Without slurm.conf, scontrol searches for it for a minute."""
LACKING = re.compile(
    r"munge|authentication|configuration|config source|plugin|shared librar|SlurmUser",
    re.IGNORECASE,
)
"""Output of commands that lack files. Other errors may be due to slurmctld being down."""
FIX = (
    "add the files that they need to cluster.slurm.container.mounts, at the same paths: scontrol,"
    " srun and scancel, Slurm's libraries and plugins, the folder of slurm.conf and the socket of"
    " munge, for example /usr/bin/scontrol:/usr/bin/scontrol, /usr/lib64/slurm:/usr/lib64/slurm,"
    " /etc/slurm:/etc/slurm, /run/munge:/run/munge (docs/slurm.md, Containers)"
)


def check_commands(shell: Shell) -> None:
    """Raises CannotLead if a job could not be requeued from here."""
    for argv in NEEDED:
        why = _lacks(shell, argv)
        if why:
            raise CannotLead(
                f"Slurm's commands do not work in the container: `{' '.join(argv)}`: {why}; without"
                " them the job cannot be requeued at its time limit or replace a drained or lost"
                " node",
                fix=FIX,
            )


def _lacks(shell: Shell, argv: tuple[str, ...]) -> str:
    try:
        done = shell(argv, timeout=ANSWER_S)
    except TimeoutError as exc:
        log.warning("failed to test Slurm's commands in the container: %s", exc)
        return ""
    if done.code == 127 or (done.code != 0 and LACKING.search(done.err)):
        return " ".join(done.err.split()) or f"exit code {done.code}"
    return ""
