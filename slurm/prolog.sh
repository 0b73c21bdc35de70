#!/usr/bin/env bash
# Slurm's Prolog: checks the node before a job starts. If the node is faulty, the script drains it
# with the reason, and Slurm requeues the job (exit code 1).
set -u -o pipefail
# shellcheck source=slurm/host_checks.sh
. "$(dirname "$(readlink -f "$0")")/host_checks.sh"

why=$(faults)
[ -z "$why" ] && exit 0
drain "prolog: $why"
exit 1
