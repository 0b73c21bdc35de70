"""How a launch becomes agents on hosts: a room for each kind of cluster.

Nothing is imported here: the first process of a pod comes through (`entry/pod_start.py`).
"""
