"""The devices that ndctl has a hardware profile of, by name.

The profiles themselves are in `inventory/profiles/`; the names stand here because a spec says one.
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
"""The profile of ranks without a device."""
PROFILE_NAMES = (*GPU_NAMES, CPU)
