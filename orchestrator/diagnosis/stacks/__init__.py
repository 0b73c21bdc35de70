"""Reads stacks of ranks, in Python and in the kernel."""
