"""How well logs, kernel lines and dumps are classified: `python -m benchmarks.corpus`."""
