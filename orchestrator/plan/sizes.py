"""Bytes per value, shared by the memory, traffic and time models."""

COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
"""Bytes of a value that is computed with or sent, by type."""
FLOAT32_BYTES = COMPUTE_BYTES["float32"]
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""4 bits, and for each 64 weights a scale of 8 bits, of which 256 share a float32 (Dettmers et al.
2023, section 3: block sizes 64 and 256)."""
LARGE = 2**25
"""Parameters from which embedding and head are units of their own: `LARGE` of the trainer's
`parallel/fsdp.py`, with which a test compares."""
