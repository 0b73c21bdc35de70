#!/bin/bash

# job: 2 ranks on 2 hosts and 1 spare (dp_shard=2), 10 steps. Start it with `sbatch` and this file,
# or with `ndctl submit`. When it has started, `ndctl status job`, `logs`, `cancel` and the other
# commands find it in /runs/a b/job; set NDCTL_RUN_ROOT or --run-root.

# The Slurm options of the spec (cluster.slurm) and the nodes of the plan. ndctl finds the job by
# its comment.
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

# Options that ndctl needs: to requeue the job, to continue when a node dies, and to get a signal
# 120 s before the time limit, so that the ranks write a checkpoint.
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --signal=USR2@120
#SBATCH --open-mode=append

# Options of srun in the environment of sbatch do not change the job.
unset SLURM_BCAST SLURM_BCAST_EXCLUDE SLURM_COMPRESS SLURM_CONSTRAINT SLURM_CORE_SPEC
unset SLURM_DEPENDENCY SLURM_EPILOG SLURM_EXACT SLURM_EXCLUSIVE SLURM_GRES SLURM_GRES_FLAGS
unset SLURM_IMMEDIATE SLURM_LABELIO SLURM_MPI_TYPE SLURM_OVERLAP SLURM_PROLOG SLURM_REMOTE_CWD
unset SLURM_RESV_PORTS SLURM_SEND_LIBS SLURM_STDINMODE SLURM_STEP_GRES SLURM_TASK_EPILOG
unset SLURM_TASK_PROLOG SLURM_TEST_EXEC SLURM_THREAD_SPEC SLURM_THREADS SLURM_TIMELIMIT
unset SLURM_USE_MIN_NODES SLURM_WORKING_DIR SRUN_CONTAINER SRUN_CPUS_PER_TASK SRUN_EXPORT_ENV

# Relative paths in the spec and in cluster.slurm.setup start here.
cd /home/me || echo "folder does not exist on $HOSTNAME: "/home/me >&2

# From cluster.slurm.modules and cluster.slurm.setup.
module load cuda/12.4 || exit 1
module load nccl || exit 1
ulimit -n 65536
source "$HOME/env"

# With `sbatch --array` each array task is a separate job with its number in the name.
name=job${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
run_dir='/runs/a b'/$name

# Create the run directory and the secret of the job, unless `ndctl submit` has done it. Exit if
# another job has this name.
srun '--container-image=nvcr.io#nvidia/pytorch:26.09-py3' --container-mounts=/runs:/runs,/data:/data:ro --container-workdir=/workspace --container-env=HF_HOME --mpi=none --overlap --nodes=1 --ntasks=1 --cpu-bind=none python -P -u -m orchestrator.backends.entry.slurm_before_srun \
  --run-dir="$run_dir" --script="$0" <<'END_OF_JOB' || exit
name: job
# Plan, trainer configuration and submission of that spec, packed (base64 -d | gunzip).
…
END_OF_JOB

# Start one agent per node. It starts and monitors the ranks of its node. The agent of the first
# node leads. Their logs are in logs/ of the run directory.
srun --unbuffered \
  --output="$run_dir"/slurm/launch-1/%j-${SLURM_RESTART_COUNT:-0}_%t_log.out \
  --error="$run_dir"/slurm/launch-1/%j-${SLURM_RESTART_COUNT:-0}_%t_log.err \
  --no-kill --kill-on-bad-exit=0 --wait=0 --open-mode=append --cpu-bind=none --cpus-per-task=64 '--container-image=nvcr.io#nvidia/pytorch:26.09-py3' --container-mounts=/runs:/runs,/data:/data:ro --container-workdir=/workspace --container-env=HF_HOME --mpi=none \
  python -P -u "$run_dir"/snapshot/orchestrator/run_module.py orchestrator.backends.entry.slurm_task \
  --run-dir="$run_dir" --launch=1 --devices=2 --agent-timeout=10.0 --first-leads && exit

# srun failed. If only srun was killed, wait for the agents, which keep running. If no agent is left
# to requeue the job, requeue it.
srun '--container-image=nvcr.io#nvidia/pytorch:26.09-py3' --container-mounts=/runs:/runs,/data:/data:ro --container-workdir=/workspace --container-env=HF_HOME --mpi=none --overlap --nodes=1 --ntasks=1 --cpu-bind=none python -P -u "$run_dir"/snapshot/orchestrator/run_module.py orchestrator.backends.entry.slurm_after_srun --run-dir="$run_dir" --launch=1 --code=$? --batch-output="$(readlink /proc/self/fd/2)"
