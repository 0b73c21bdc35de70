#!/bin/bash
# Your own batch script that trains a job of ndctl: `sbatch examples/own-batch-script.sh`.
# `srun ndctl agent SPEC` replaces `srun torchrun …`. The job is planned for the nodes that Slurm
# granted, and is then like a job of `ndctl submit`. docs/slurm.md says more.
#SBATCH --job-name=mine
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --exclusive
#SBATCH --time=30

# Without these lines the job ends at its time limit, or when a node is lost.
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=USR2@90
#SBATCH --open-mode=append

# Your own lines before and after training stay.
export OMP_NUM_THREADS=1

# One task per node, not bound to cores, in a step that continues when one task ends.
srun --ntasks-per-node=1 --cpu-bind=none --no-kill --kill-on-bad-exit=0 --wait=0 \
  ndctl agent examples/slurm.yaml
