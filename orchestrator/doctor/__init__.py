"""What would stop a job: on this machine (`machine.py`), and on its Slurm cluster (`slurm.py`)."""
