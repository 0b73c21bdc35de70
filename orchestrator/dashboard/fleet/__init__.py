"""All jobs at once, one row each."""
