"""The simulated cluster: hosts, network, storage, schedulers, ranks and faults."""
