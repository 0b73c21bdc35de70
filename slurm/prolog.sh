#!/usr/bin/env bash
# Slurm's Prolog: looks at the node before a job gets it. On trouble the node is drained with the
# reason, and the job goes back to the queue (exit code 1).
set -u -o pipefail
# shellcheck source=slurm/host_checks.sh
. "$(dirname "$(readlink -f "$0")")/host_checks.sh"

why=$(troubles)
[ -z "$why" ] && exit 0
drain "prolog: $why"
exit 1
