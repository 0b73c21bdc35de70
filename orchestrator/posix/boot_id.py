"""The kernel's id of the last boot of this machine."""

from pathlib import Path


def boot_id(file: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """The id, which is another one after each boot. Containers have that of their machine.

    Returns an empty string on a machine without such a file, as on macOS.
    """
    try:
        return file.read_text().strip()
    except OSError:
        return ""
