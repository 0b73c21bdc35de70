"""What a leader does only on Kubernetes: it watches its job's object and reports to it."""
