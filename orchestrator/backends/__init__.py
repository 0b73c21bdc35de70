"""Backends, which start agents on hosts; one folder per kind of cluster.

This file imports nothing, because the first process of a pod (`entry/pod_start.py`) must start
fast.
"""
