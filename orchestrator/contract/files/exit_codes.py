"""Exit codes of all programs of ndctl.

Codes from 200 on ask the scheduler to start the agent again. They are above 128 because the
Kubeflow operator's `restartPolicy: ExitCode` retries those and treats 1-127 as final, and above 192
because 128 + n means death by signal n.
"""

OK = 0
FAILED = 1
"""The job failed, or an unexpected error was raised."""
USAGE = 2
"""The command line could not be understood (click's own code)."""
BAD_SPEC = 3
NO_PLAN = 4
BAD_JOB_STATE = 5
"""The job does not exist, or its state does not allow the command."""
BACKEND = 6
CANCELLED = 7
"""`submit --follow` saw that the job was cancelled."""
TIMED_OUT = 124
"""`ndctl wait` reached its timeout, as the command `timeout` does. The jobs keep running."""
REFUSED = 78
"""A rank refuses its configuration (sysexits' EX_CONFIG). A restart would fail in the same way."""
UNSTABLE = 79
"""A rank whose loss is not finite or spikes. A restart would reach the same steps again."""
NOT_ADMITTED = 77
"""The leader refused the agent's proof of the job's secret (sysexits' EX_NOPERM)."""
INTERRUPTED = 130
"""Ctrl-C in a command that follows a job. The job itself keeps running."""
CHECKPOINTED = 210
"""A rank that was asked to stop (SIGTERM, SIGUSR1) wrote its checkpoint and exited."""
REQUEUED = 212
"""The leader gave the job back to the scheduler's queue, or told the agent to exit so that another
agent starts in its place."""
LEADER_LOST = 211
"""The agent lost its leader, stopped its ranks and exited; the job must be requeued."""
