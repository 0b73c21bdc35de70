"""Submit a job: `ndctl submit`, `render`, and jobs in an existing Slurm allocation."""
