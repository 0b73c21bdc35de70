"""Ranks whose process outlives an attempt."""
