"""Names of the devices that have a hardware profile.

The profiles are in `inventory/profiles/`. The names are here because a spec may contain one.
"""

GPU_NAMES = (
    "h100-sxm-80gb",
    "h100-sxm-96gb-500w",
    "h200-sxm-141gb",
    "a100-sxm-80gb",
    "a100-sxm-40gb",
    "b200-sxm-180gb",
    "l40s-48gb",
    "rtx4090-24gb",
)
CPU = "cpu"
"""Profile of ranks that run without a GPU."""
PROFILE_NAMES = (*GPU_NAMES, CPU)
