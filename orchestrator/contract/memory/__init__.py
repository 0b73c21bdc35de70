"""Checkpoints in the memory of hosts, as ranks, agents and the leader all see them."""
