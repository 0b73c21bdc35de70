"""Parses the output of Slurm's commands. Nothing here runs one."""
