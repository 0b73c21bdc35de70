"""What an allocation needs on its nodes: the code, hooks, addresses, and how its srun ended."""
