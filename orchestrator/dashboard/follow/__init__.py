"""What `submit --follow` and `logs` print while a job runs."""
