"""A plan for people and for scripts."""
