"""One file per axis of the mesh, one `apply_*` function each."""
