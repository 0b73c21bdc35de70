"""What a script of a shell says, without running it."""
