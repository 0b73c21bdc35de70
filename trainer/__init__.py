"""The bundled trainer: one rank of an n-dimensional parallel training job, on torch."""
