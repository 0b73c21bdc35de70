#!/bin/bash

# job: 2 ranks on 2 hosts, 1 to spare (dp_shard=2), 10 steps. `sbatch` with this file starts it, as
# `ndctl submit` does; `ndctl status job`, `logs`, `cancel` and the others find it in /runs/a b/job,
# once it has begun, with NDCTL_RUN_ROOT or --run-root.

# What the spec asks of Slurm (cluster.slurm), and the plan of the nodes. ndctl knows the job by its
# comment.
#SBATCH --job-name=ndctl-job
#SBATCH --comment='ndctl launch 1 of /runs/a b/job; it'"'"'s mine; all of it'
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --partition=train
#SBATCH --account=ml
#SBATCH --qos=high
#SBATCH --reservation=lab
#SBATCH --time=1-00:00:00
#SBATCH --gpus-per-node=h100:2
#SBATCH --gres=nvme:1
#SBATCH --cpus-per-task=64
#SBATCH --mem=500G
#SBATCH --exclusive
#SBATCH --constraint='ib&h100'
#SBATCH --nodelist='node[1-8]'
#SBATCH --exclude=node3
#SBATCH --switches=1@10:00
#SBATCH --segment=2
#SBATCH --licenses=sim:2
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --nice=5
#SBATCH -H

# What ndctl needs: it has the job queued again, goes on without a node that dies, and hears of the
# time limit 120 s before, when ranks write a checkpoint.
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=USR2@120
#SBATCH --open-mode=append

# Paths in the spec, and in lines of cluster.slurm.setup, are relative to this.
cd /home/me || echo "$HOSTNAME has no folder "/home/me >&2

# cluster.slurm.modules and setup.
module load cuda/12.4 || exit 1
module load nccl || exit 1
ulimit -n 65536
source "$HOME/env"

# With `sbatch --array` each element is a job of its own, with its number.
name=job${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
run_dir='/runs/a b'/$name

# Make the run directory and in it the job's secret, where `ndctl submit` has not. End here where
# another job has the name.
srun '--container-image=nvcr.io#nvidia/pytorch:26.09-py3' --container-mounts=/runs:/runs,/data:/data:ro --container-workdir=/workspace --container-env=HF_HOME --mpi=none --overlap --nodes=1 --ntasks=1 --cpu-bind=none python -P -u -m orchestrator.backends.entry.slurm_before_srun \
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
  --no-kill --kill-on-bad-exit=0 --wait=0 --open-mode=append --cpu-bind=none --cpus-per-task=64 '--container-image=nvcr.io#nvidia/pytorch:26.09-py3' --container-mounts=/runs:/runs,/data:/data:ro --container-workdir=/workspace --container-env=HF_HOME --mpi=none \
  python -P -u "$run_dir"/snapshot/orchestrator/run_module.py orchestrator.backends.entry.slurm_task \
  --run-dir="$run_dir" --launch=1 --devices=2 --agent-timeout=10.0 --first-leads && exit

# It did not end well. Where srun alone was killed, wait for the agents that live on; where none is
# left that could, have the job queued again.
srun '--container-image=nvcr.io#nvidia/pytorch:26.09-py3' --container-mounts=/runs:/runs,/data:/data:ro --container-workdir=/workspace --container-env=HF_HOME --mpi=none --overlap --nodes=1 --ntasks=1 --cpu-bind=none python -P -u "$run_dir"/snapshot/orchestrator/run_module.py orchestrator.backends.entry.slurm_after_srun --run-dir="$run_dir" --launch=1 --code=$?
