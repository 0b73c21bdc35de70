"""Files of a run directory that several programs read: their places, names and formats."""
