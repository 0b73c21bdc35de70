"""From documents of any source to token files."""
