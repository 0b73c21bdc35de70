#!/bin/bash

# job: 2 ranks on 2 hosts (dp_shard=2), 10 steps. `sbatch` with this file starts it, as `ndctl
# submit` does; `ndctl status job`, `logs`, `cancel` and the others find it in /runs/job, once it
# has begun, with NDCTL_RUN_ROOT or --run-root.

# What the spec asks of Slurm (cluster.slurm), and the plan of the nodes. ndctl knows the job by its
# comment.
#SBATCH --job-name=ndctl-job
#SBATCH --comment='ndctl launch 1 of /runs/job'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0

# What ndctl needs: it has the job queued again, goes on without a node that dies, and hears of the
# time limit 90 s before, when ranks write a checkpoint.
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=USR2@90
#SBATCH --open-mode=append

# Paths in the spec, and in lines of cluster.slurm.setup, are relative to this.
cd /home/me || echo "$HOSTNAME has no folder "/home/me >&2

# With `sbatch --array` each element is a job of its own, with its number.
name=job${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
run_dir=/runs/$name

# Make the run directory and in it the job's secret, where `ndctl submit` has not. End here where
# another job has the name.
/venv/bin/python -P -u /ndctl/orchestrator/run_module.py orchestrator.backends.entry.slurm_before_srun \
  --run-dir="$run_dir" --script="$0" <<'END_OF_JOB' || exit
name: job
# Plan, trainer configuration and submission of that spec, packed (base64 -d | gunzip).
…
END_OF_JOB

# One agent on each node starts the ranks there and watches over them; that of the first node leads.
# What they say is in logs/ of the run directory.
srun --unbuffered \
  --output="$run_dir"/slurm/launch-1/%j-${SLURM_RESTART_COUNT:-0}_%t_log.out \
  --error="$run_dir"/slurm/launch-1/%j-${SLURM_RESTART_COUNT:-0}_%t_log.err \
  --no-kill --kill-on-bad-exit=0 --wait=0 --open-mode=append --cpu-bind=none \
  /venv/bin/python -P -u /ndctl/orchestrator/run_module.py orchestrator.backends.entry.slurm_task \
  --run-dir="$run_dir" --launch=1 --devices=2 --agent-timeout=10.0 --first-leads && exit

# It did not end well. Where srun alone was killed, wait for the agents that live on; where none is
# left that could, have the job queued again.
/venv/bin/python -P -u /ndctl/orchestrator/run_module.py orchestrator.backends.entry.slurm_after_srun --run-dir="$run_dir" --launch=1 --code=$?
