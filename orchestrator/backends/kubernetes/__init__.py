"""Pods of a cluster as the hosts of a job: rendered, submitted, watched, found again."""
