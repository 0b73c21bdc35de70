"""Detectors: what heartbeats, step times and the all-reduce check say of hosts and ranks. Pure."""
