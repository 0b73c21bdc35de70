"""What a cluster is told of a job, in few and short texts. Pure."""
