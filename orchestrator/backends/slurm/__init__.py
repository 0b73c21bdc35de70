"""Slurm: one allocation with one agent a node, from a batch script that carries the job.

`render` writes the script, `observe` reads what Slurm says, both pure; `checks` looks before a job
is queued; `backend` ties them to the cluster. What the script runs is in `backends/entry`:
`slurm_before_srun` begins a job on its first node, `slurm_task` runs on each, `slurm_after_srun` is
the end.
"""
