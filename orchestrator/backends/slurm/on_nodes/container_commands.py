"""Slurm's commands inside of a container, where the leader needs them as much as outside."""

import logging
import re

from orchestrator.errors import CannotLead
from orchestrator.seams import Shell

log = logging.getLogger(__name__)

NEEDED = (("scontrol", "ping"), ("srun", "--version"))
ANSWER_S = 75.0
"""Where slurm.conf is missing, scontrol itself looks for it for a minute."""
LACKING = re.compile(
    r"munge|authentication|configuration|config source|plugin|shared librar|SlurmUser",
    re.IGNORECASE,
)
"""What commands print that lack something around them; slurmctld may be down for a while."""
FIX = (
    "add to cluster.slurm.container.mounts what they need, each under its own name: scontrol, srun"
    " and scancel, Slurm's libraries and plugins, the folder of slurm.conf and munge's socket, for"
    " example /usr/bin/scontrol:/usr/bin/scontrol, /usr/lib64/slurm:/usr/lib64/slurm,"
    " /etc/slurm:/etc/slurm, /run/munge:/run/munge (docs/slurm.md, Containers)"
)


def check_commands(shell: Shell) -> None:
    """Raises CannotLead where a job could not be queued again from here."""
    for argv in NEEDED:
        why = _lacks(shell, argv)
        if why:
            raise CannotLead(
                f"Slurm's commands do not work inside of the container: `{' '.join(argv)}`: {why}:"
                " without them the job is not queued again at its time limit, nor is a drained or"
                " lost node made good",
                fix=FIX,
            )


def _lacks(shell: Shell, argv: tuple[str, ...]) -> str:
    try:
        done = shell(argv, timeout=ANSWER_S)
    except TimeoutError as exc:
        log.warning("whether Slurm's commands work inside of the container is not known: %s", exc)
        return ""
    if done.code == 127 or (done.code != 0 and LACKING.search(done.err)):
        return " ".join(done.err.split()) or f"exit code {done.code}"
    return ""
