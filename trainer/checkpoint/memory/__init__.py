"""Checkpoints in the memory of the hosts, from which ranks resume if all hosts survive."""
