#!/usr/bin/env bash
# Slurm's Epilog: removes the shared memory that killed ranks left, and drains a node that a job
# left in a bad state. The job itself is over: the exit code is 0.
set -u -o pipefail
# shellcheck source=slurm/host_checks.sh
. "$(dirname "$(readlink -f "$0")")/host_checks.sh"

# Only for users without processes on this node: ranks of another job may still need theirs.
if [ -n "${SLURM_JOB_UID:-}" ] && ! pgrep -u "$SLURM_JOB_UID" >/dev/null; then
  find "$root/dev/shm" -maxdepth 1 -type f -user "$SLURM_JOB_UID" \
    \( -name 'nccl-*' -o -name 'torch_*' -o -name '__KMP_REGISTERED_LIB_*' \) -delete
fi
why=$(troubles)
[ -z "$why" ] || drain "epilog of job ${SLURM_JOB_ID:-?}: $why"
exit 0
