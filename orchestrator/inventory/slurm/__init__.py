"""What Slurm says of a cluster, from the text of its commands to values; nothing here runs one."""
