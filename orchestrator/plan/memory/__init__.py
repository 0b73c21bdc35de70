"""The memory model: the peak memory of a rank, by item."""
