"""Reads dumps of flight recorders safely, reduces them, and selects those of one hang."""
