"""The registry of jobs."""
