"""A local copy of the journal, metrics and logs of a job in a cluster."""
