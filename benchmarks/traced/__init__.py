"""A step of the bundled trainer with fake tensors, and every allocation of it."""
