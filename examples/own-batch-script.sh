#!/bin/bash
# A batch script of your own that trains a job of ndctl, queued by `sbatch examples/own-batch-script.sh`.
# `srun ndctl agent SPEC` stands where `srun torchrun …` would: the job is planned for the nodes that
# Slurm gave, and is one as `ndctl submit` makes it. docs/slurm.md says more.
#SBATCH --job-name=mine
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --exclusive
#SBATCH --time=30

# Without these the job ends with its time limit, or with the first node that is lost.
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=USR2@90
#SBATCH --open-mode=append

# What you do before and after training stays as it is.
export OMP_NUM_THREADS=1

# One task a node, not bound to cores, in a step that goes on when one of them ends.
srun --ntasks-per-node=1 --cpu-bind=none --no-kill --kill-on-bad-exit=0 --wait=0 \
  ndctl agent examples/slurm.yaml
