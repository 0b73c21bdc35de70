"""The entry points of processes that a backend starts: agent, leader, and what a batch script or
a pod runs.

The first process of a pod comes through here, so nothing is imported in this file.
"""
