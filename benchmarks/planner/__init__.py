"""Time and memory of the planner (`python -m benchmarks.planner`); tests of its constants."""
