"""Slurm: one allocation with one agent a node, from a batch script that carries the job.

`render` writes the script, `observe` reads what Slurm says, both pure; `before_srun` begins a job
on its first node, `task` is what runs on each, `after_srun` is the end; `checks` looks before a job
is queued; `backend` ties them to the cluster.
"""
