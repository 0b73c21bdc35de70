"""Code for the nodes of an allocation: code snapshot, hooks, addresses, and the end of srun."""
