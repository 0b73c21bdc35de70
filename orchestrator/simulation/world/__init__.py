"""What a simulated job runs on: hosts, network, storage, schedulers, ranks, and what breaks."""
