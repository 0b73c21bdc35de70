"""Use cases: what the command line's verbs do, a module for each part of a job's way."""
