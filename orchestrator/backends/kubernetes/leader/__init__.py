"""What a leader does only on Kubernetes: watch its job object and report to it."""
