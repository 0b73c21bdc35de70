"""What earlier jobs measured, and what follows from it for the speed of a plan."""
