"""What this rank tells its agent of a hang: its stacks and its last collectives."""
