"""Entry points of processes: agent, leader, and the programs of batch scripts and pods.

This file imports nothing, because the first process of a pod must start fast.
"""
