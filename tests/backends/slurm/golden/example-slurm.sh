#!/bin/bash

# slurm-demo: 4 ranks on 2 hosts (pp=2 x dp_shard=2), 1,000 steps. Start it with `sbatch` and this
# file, or with `ndctl submit`. When it has started, `ndctl status slurm-demo`, `logs`, `cancel` and
# the other commands find it in /runs/slurm-demo; set NDCTL_RUN_ROOT or --run-root.

# The Slurm options of the spec (cluster.slurm) and the nodes of the plan. ndctl finds the job by
# its comment.
#SBATCH --job-name=ndctl-slurm-demo
#SBATCH --comment='ndctl launch 1 of /runs/slurm-demo'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --partition=train
#SBATCH --time=0:30:00
#SBATCH --gpus-per-node=2
#SBATCH --exclusive

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
export OMP_NUM_THREADS=1

# With `sbatch --array` each array task is a separate job with its number in the name.
name=slurm-demo${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
run_dir=/runs/$name

# Create the run directory and the secret of the job, unless `ndctl submit` has done it. Exit if
# another job has this name.
python -P -u /ndctl/orchestrator/run_module.py orchestrator.backends.entry.slurm_before_srun \
  --run-dir="$run_dir" --script="$0" <<'END_OF_JOB' || exit
name: slurm-demo
model:
  preset: llama-tiny
data:
  files: '{stdlib}/*.py'
  format: auto
  column: text
  tokenizer: bytes
  sequence_length: 128
  document_mask: auto
train:
  steps: 1000
  global_batch_size: 16
  micro_batch_size: auto
  seed: 0
  dtype: auto
  reduce_dtype: float32
  optimizer:
    name: adamw
    lr: 0.0003
    weight_decay: 0.1
    beta1: 0.9
    beta2: 0.95
    eps: 1.0e-08
    state_dtype: float32
  schedule:
    kind: cosine
    warmup_steps: 0
    min_lr_factor: 0.0
  activation_checkpointing: auto
  compile: false
  float8: false
  deterministic: false
  loss_chunks: auto
  run_ahead: auto
  max_bad_steps: 3
  tensorboard: false
  grad_clip: 1.0
parallel:
  pp: auto
  dp_replicate: auto
  dp_shard: auto
  cp: auto
  tp: auto
  data: fsdp
  fsdp:
    wrap: auto
    reshard_after_forward: auto
    reduce_gradients: auto
    forward_prefetch: 1
    backward_prefetch: 1
    cpu_offload: false
  context: ring
  pipeline:
    schedule: auto
    stages_per_rank: auto
objective: throughput
cluster:
  backend: slurm
  hosts: 2
  gpus_per_host: 2
  spare_hosts: 0
  memory_margin: auto
  slurm:
    partition: train
    time: 0:30:00
    gpus: per-node
    exclusive: true
    switch_wait: '1:00'
    notice_s: 120.0
    on_drain: auto
    env: {}
    hooks:
      timeout: 300.0
      after_timeout: 30.0
    modules: []
    setup:
    - export OMP_NUM_THREADS=1
    sbatch_args: []
    srun_args: []
    snapshot: false
checkpoint:
  every_steps: 10
  keep: 2
  async: true
  verify: true
  memory:
    every: auto
    copies: 2
resilience:
  max_restarts: 5
  max_allocations: 3
  hang_timeout: auto
  checkpoint_timeout: auto
  init_timeout: auto
  agent_timeout: 10.0
  stop_grace: 30.0
  shrink: false
  min_hosts: 1
  replace_stragglers: false
  replace_warned: true
  keep_ranks: false
  preflight: auto
  on_oom: stop
  on_nan: stop
  keep_attempts: 100
  failure_classes: []
  policy: []
notify: []
run_root: /runs
# Plan, trainer configuration and submission of that spec, packed (base64 -d | gunzip).
…
END_OF_JOB

# Start one agent per node. It starts and monitors the ranks of its node. The agent of the first
# node leads. Their logs are in logs/ of the run directory.
srun --unbuffered \
  --output="$run_dir"/slurm/launch-1/%j-${SLURM_RESTART_COUNT:-0}_%t_log.out \
  --error="$run_dir"/slurm/launch-1/%j-${SLURM_RESTART_COUNT:-0}_%t_log.err \
  --no-kill --kill-on-bad-exit=0 --wait=0 --open-mode=append --cpu-bind=none \
  python -P -u /ndctl/orchestrator/run_module.py orchestrator.backends.entry.slurm_task \
  --run-dir="$run_dir" --launch=1 --devices=2 --agent-timeout=10.0 --first-leads && exit

# srun failed. If only srun was killed, wait for the agents, which keep running. If no agent is left
# to requeue the job, requeue it.
python -P -u /ndctl/orchestrator/run_module.py orchestrator.backends.entry.slurm_after_srun --run-dir="$run_dir" --launch=1 --code=$? --batch-output="$(readlink /proc/self/fd/2)"
