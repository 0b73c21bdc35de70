"""Read-only views of a job, built from its journal and its metrics file."""
