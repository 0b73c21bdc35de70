#!/bin/bash

# Parameters
#SBATCH --comment='ndctl launch 1 of /runs/slurm-spare'
#SBATCH --error=/runs/slurm-spare/slurm/launch-1/%j_0_log.err
#SBATCH --exclusive
#SBATCH --gpus-per-node=2
#SBATCH --job-name=ndctl-slurm-spare
#SBATCH --no-kill
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/runs/slurm-spare/slurm/launch-1/%j_0_log.out
#SBATCH --partition=train
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1-00:00:00

# setup
ln -sf /runs/slurm-spare/slurm/launch-1/task.pkl /runs/slurm-spare/slurm/launch-1/"$SLURM_JOB_ID"_submitted.pkl
export PYTHONSAFEPATH=1 PYTHONPATH=/runs/slurm-spare/snapshot"${PYTHONPATH:+:$PYTHONPATH}"

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /runs/slurm-spare/slurm/launch-1/%j_%t_log.out --error /runs/slurm-spare/slurm/launch-1/%j_%t_log.err --no-kill --kill-on-bad-exit=0 --wait=0 --open-mode=append --cpu-bind=none python -P -u -m submitit.core._submit /runs/slurm-spare/slurm/launch-1 || python -P -m orchestrator.backends.slurm.after_srun --run-dir=/runs/slurm-spare --launch=1 --code=$?
