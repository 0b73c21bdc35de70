"""A plan as one HTML page without scripts or other files."""
