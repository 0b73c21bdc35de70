#!/bin/bash

# Parameters
#SBATCH --account=ml
#SBATCH --comment='ndctl launch 1 of /runs/a b/job; it'"'"'s mine; all of it'
#SBATCH --constraint='ib&h100'
#SBATCH --cpus-per-task=64
#SBATCH --error='/runs/a b/job/slurm/launch-1/%j_0_log.err'
#SBATCH --exclude=node3
#SBATCH --exclusive
#SBATCH --gpus-per-node=h100:2
#SBATCH --gres=nvme:1
#SBATCH --job-name=ndctl-job
#SBATCH --licenses=sim:2
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --mem=500G
#SBATCH --no-kill
#SBATCH --nodelist='node[1-8]'
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/runs/a b/job/slurm/launch-1/%j_0_log.out'
#SBATCH --partition=train
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --reservation=lab
#SBATCH --segment=2
#SBATCH --signal=USR2@120
#SBATCH --switches=1@10:00
#SBATCH --time=1-00:00:00

# setup
#SBATCH --nice=5
#SBATCH -H
ln -sf '/runs/a b/job/slurm/launch-1/task.pkl' '/runs/a b/job/slurm/launch-1'/"$SLURM_JOB_ID"_submitted.pkl
module load cuda/12.4 || exit 1
module load nccl || exit 1
export PYTHONSAFEPATH=1 PYTHONPATH='/runs/a b/job/snapshot'"${PYTHONPATH:+:$PYTHONPATH}"
ulimit -n 65536
source "$HOME/env"

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '/runs/a b/job/slurm/launch-1/%j_%t_log.out' --error '/runs/a b/job/slurm/launch-1/%j_%t_log.err' --no-kill --kill-on-bad-exit=0 --wait=0 --open-mode=append --cpu-bind=none --cpus-per-task=64 '--container-image=nvcr.io#nvidia/pytorch:26.09-py3' --container-mounts=/runs:/runs,/data:/data:ro --container-workdir=/workspace --container-env=HF_HOME --mpi=none python -P -u -m submitit.core._submit '/runs/a b/job/slurm/launch-1' || srun '--container-image=nvcr.io#nvidia/pytorch:26.09-py3' --container-mounts=/runs:/runs,/data:/data:ro --container-workdir=/workspace --container-env=HF_HOME --mpi=none --overlap --nodes=1 --ntasks=1 --cpu-bind=none python -P -m orchestrator.backends.slurm.after_srun '--run-dir=/runs/a b/job' --launch=1 --code=$?
