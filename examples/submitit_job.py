"""A job of ndctl from Python, through submitit: `python examples/submitit_job.py SPEC [OPTIONS]`.

submitit's executor asks Slurm for the nodes; `ndctl submit --here` trains on them, and recovers
within them. docs/slurm.md has the differences to a job that ndctl submits itself.
"""

import sys

import submitit

executor = submitit.SlurmExecutor(folder="submitit")
executor.update_parameters(
    job_name="from-python",
    nodes=2,
    exclusive=True,
    time=30,
    use_srun=False,  # the one command of the allocation starts the agents of all nodes
    additional_parameters={"no_kill": True},  # a lost node does not end the allocation
)
train = submitit.helpers.CommandFunction(["ndctl", "submit", *sys.argv[1:], "--here"])
job = executor.submit(train)
print(f"Slurm job {job.job_id}; its output: {job.paths.stdout}")
# job.result() waits, and raises if the training failed; it needs Slurm's accounting.
