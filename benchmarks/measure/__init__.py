"""Shared by all benchmarks: timing, medians and their intervals, the machine."""
