"""What a person asks the ranks of a running job: where they are, and what takes their time."""
