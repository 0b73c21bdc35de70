"""The bundled trainer against its peers: `python -m benchmarks.trainer`."""
