"""How often `ndctl diagnose` names the right rank: `python -m benchmarks.diagnosis`."""
