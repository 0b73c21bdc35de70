"""What people look at: folded from the journal and the metrics, unable to change anything."""
