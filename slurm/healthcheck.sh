#!/usr/bin/env bash
# Slurm's HealthCheckProgram: drains a faulty node. Jobs on the node continue. The script never
# resumes a node: a person does after the repair (scontrol update State=RESUME).
set -u -o pipefail
# shellcheck source=slurm/host_checks.sh
. "$(dirname "$(readlink -f "$0")")/host_checks.sh"

why=$(faults)
[ -z "$why" ] || drain "health check: $why"
exit 0
