"""The public Python package: what a training script imports under `ndctl run -- train.py`."""
