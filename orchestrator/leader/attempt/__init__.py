"""How a leader starts an attempt on the hosts: rendezvous, checkpoints in their memory, spares."""
