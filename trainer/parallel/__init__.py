"""Parallelism: one file per axis of the mesh, with one `apply_*` function each."""
