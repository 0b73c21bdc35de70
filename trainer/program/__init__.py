"""Runs the user's own program as a rank, with what the bundled trainer reports itself."""
