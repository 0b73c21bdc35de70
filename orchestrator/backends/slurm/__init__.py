"""The Slurm backend: a batch script that contains the job starts one agent on each node.

`render` writes the script and `observe` parses Slurm's output, both pure. `checks` runs before a
job is queued, and `backend` talks to the cluster. The programs of the script are in
`backends/entry`: `slurm_before_srun` on the first node, `slurm_task` on each node, and
`slurm_after_srun` at the end.
"""
