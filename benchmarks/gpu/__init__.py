"""What GPUs show: `python -m benchmarks.gpu`."""
