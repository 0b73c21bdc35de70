"""ndctl on Slurm against plain sbatch and srun: `python -m benchmarks.slurm`."""
