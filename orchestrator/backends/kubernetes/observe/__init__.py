"""What the objects of a job say of it, as values. Pure."""
