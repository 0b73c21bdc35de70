"""What every screen shows of one job, as values: its state, its ranks, its progress."""
