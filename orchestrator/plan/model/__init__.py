"""The properties of a model that its split, memory and speed depend on."""
