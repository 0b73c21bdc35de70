"""Helpers for POSIX systems: file locks, private folders, limits, and calls that may hang or fail
for a while.
"""
