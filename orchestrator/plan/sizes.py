"""Bytes per value, shared by the memory, traffic and time models."""

COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float8": 1}
"""Bytes of a computed or sent value, by type."""
FLOAT32_BYTES = COMPUTE_BYTES["float32"]
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per NF4 weight: 4 bits, an 8-bit scale per 64 weights, and a float32 per 256 scales
(Dettmers et al. 2023, section 3)."""
LARGE = 2**22
"""With at least this many parameters, embedding and head are FSDP units of their own. A test
compares with `LARGE` in the trainer's `parallel/fsdp.py`."""
