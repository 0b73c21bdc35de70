"""Reads a job again and again, each time only what its files gained."""
