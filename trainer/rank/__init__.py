"""One rank as a process: its device, its place in the mesh, its stores, signals and heartbeats."""
