"""What the words of a rank, a launcher or a kernel mean. Pure."""
