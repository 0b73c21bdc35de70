"""Dumps of flight recorders: read safely, reduced, and sorted by standstill."""
