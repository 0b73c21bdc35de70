"""Stacks of ranks, in Python and in the kernel."""
