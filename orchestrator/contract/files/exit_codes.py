"""Exit codes of every program of ndctl, in one table.

Codes of agents and ranks from 200 on say "start me again": they lie above 128 because the Kubeflow
operator's `restartPolicy: ExitCode` retries those and takes 1-127 as final, and above 192 because
128 + n is taken by death through signal n.
"""

OK = 0
FAILED = 1
"""The job failed, or something unexpected was raised."""
USAGE = 2
"""The command line could not be understood (click's own code)."""
BAD_SPEC = 3
NO_PLAN = 4
BAD_JOB_STATE = 5
"""The job does not exist, or is not in a state that allows the verb."""
BACKEND = 6
CANCELLED = 7
"""`submit --follow` saw the job being cancelled."""
REFUSED = 78
"""A rank refuses its configuration (sysexits' EX_CONFIG); a restart would be refused again."""
UNSTABLE = 79
"""A rank whose loss is not finite, or spikes: a restart would come to the same steps again."""
NOT_ADMITTED = 77
"""An agent whose token the leader refused (sysexits' EX_NOPERM)."""
INTERRUPTED = 130
"""^C in a command that follows a job; the job itself runs on."""
CHECKPOINTED = 210
"""A rank that was asked to leave (SIGTERM, SIGUSR1), wrote its checkpoint and left."""
REQUEUED = 212
"""A leader that gave the job back to its scheduler's queue, or an agent that it told so and in
whose place another one has to come."""
LEADER_LOST = 211
"""An agent that lost its leader, stopped its ranks and left: requeue it."""
