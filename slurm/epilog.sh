#!/usr/bin/env bash
# Slurm's Epilog: deletes shared memory that killed ranks left, and drains the node if it is faulty
# after the job. The job has ended, so the exit code is always 0.
set -u -o pipefail
# shellcheck source=slurm/host_checks.sh
. "$(dirname "$(readlink -f "$0")")/host_checks.sh"

# Only if the user has no other process on this node: ranks of another job may need their memory.
if [ -n "${SLURM_JOB_UID:-}" ] && ! pgrep -u "$SLURM_JOB_UID" >/dev/null; then
  find "$root/dev/shm" -maxdepth 1 -type f -user "$SLURM_JOB_UID" \
    \( -name 'nccl-*' -o -name 'torch_*' -o -name '__KMP_REGISTERED_LIB_*' \) -delete
fi
why=$(faults)
[ -z "$why" ] || drain "epilog of job ${SLURM_JOB_ID:-?}: $why"
exit 0
