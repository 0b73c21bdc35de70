"""How many bytes a rank needs, and for what."""
