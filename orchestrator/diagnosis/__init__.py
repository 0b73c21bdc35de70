"""Finds the cause of a failure or hang: failure classes from logs, culprits from dumps and stacks.

All functions are pure: they read no clock, run no command and never import torch.
"""
