"""The planner's memory against the trainer's allocations: `python -m benchmarks.memory`."""
