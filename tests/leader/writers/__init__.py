"""What a leader keeps: snapshots, speeds, strikes against hosts, logs."""
