"""What a leader asks of agents while ranks run, or before they start."""
