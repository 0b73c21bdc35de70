"""Training data: sources, token files, the order of samples, and each rank's share of them."""
