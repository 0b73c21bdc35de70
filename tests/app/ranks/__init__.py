"""What is asked of ranks and hosts of a running job."""
