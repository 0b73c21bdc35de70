#!/usr/bin/env bash
# Slurm's HealthCheckProgram: drains a node that is not fit to run ranks; jobs on it run on. It
# never resumes a node: the person who fixed it does (scontrol update State=RESUME).
set -u -o pipefail
# shellcheck source=slurm/host_checks.sh
. "$(dirname "$(readlink -f "$0")")/host_checks.sh"

why=$(troubles)
[ -z "$why" ] || drain "health check: $why"
exit 0
