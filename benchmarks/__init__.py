"""Each module and each room with a `__main__` is a benchmark: `python -m benchmarks.NAME`.

Rooms without one are shared: `jobs` (training under ndctl, torchrun and Slurm), `measure` (timing),
`published` (training runs of others), `results` (tables), `traced` (a step with fake tensors).
"""
