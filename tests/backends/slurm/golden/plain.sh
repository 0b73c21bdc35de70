#!/bin/bash

# Parameters
#SBATCH --comment='ndctl launch 1 of /runs/job'
#SBATCH --error=/runs/job/slurm/launch-1/%j_0_log.err
#SBATCH --exclusive
#SBATCH --gpus-per-node=2
#SBATCH --job-name=ndctl-job
#SBATCH --no-kill
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/runs/job/slurm/launch-1/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@90

# setup
ln -sf /runs/job/slurm/launch-1/task.pkl /runs/job/slurm/launch-1/"$SLURM_JOB_ID"_submitted.pkl

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /runs/job/slurm/launch-1/%j_%t_log.out --error /runs/job/slurm/launch-1/%j_%t_log.err --no-kill --kill-on-bad-exit=0 --wait=0 --open-mode=append --cpu-bind=none /venv/bin/python -P -u -m submitit.core._submit /runs/job/slurm/launch-1 || /venv/bin/python -P -m orchestrator.backends.slurm.after_srun --run-dir=/runs/job --launch=1 --code=$?
