"""Interprets text of a rank, a launcher or a kernel. Pure."""
