"""One rank as a process: device, coordinates in the mesh, stores, signals and heartbeats."""
