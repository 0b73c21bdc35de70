"""Use cases about all jobs."""
