"""Jobs that benchmarks run: under ndctl, under bare torchrun, and under plain Slurm."""
