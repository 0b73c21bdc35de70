"""Slurm: one allocation with one agent a node, submitted with submitit's runner and batch script.

`render` writes the script, `observe` reads what Slurm says, both pure; `task` is what runs on a
node; `checks` looks before a job is queued; `backend` ties them to the cluster.
"""
