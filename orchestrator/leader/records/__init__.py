"""What a leader keeps on disk beside the journal: snapshots, strikes and old logs."""
