"""Hosts of a cluster and their devices, as values. Knows nothing about processes of jobs."""
