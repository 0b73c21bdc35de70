"""What a job measured of its own steps, and how far that is from its plan."""
