"""What exists: hosts and their devices, as values. Knows nothing of jobs' processes."""
