"""What the flight recorder costs: `python -m benchmarks.flight_recorder`."""
