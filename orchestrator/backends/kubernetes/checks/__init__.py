"""Checks before a launch on Kubernetes, before any object is created."""
