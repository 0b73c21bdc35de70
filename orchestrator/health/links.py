"""Network ports of a host, from /sys/class.

A port that is down only warns, because it may have no cable on purpose. The small all-reduce of all
hosts decides whether the network works.
"""

from collections.abc import Iterator
from pathlib import Path

from orchestrator.contract.check_results import Finding

ADMIN_UP = 0x1
"""IFF_UP: the interface is enabled."""


def examine_links(root: Path) -> Iterator[Finding]:
    yield from _infiniband(root / "sys/class/infiniband")
    yield from _ethernet(root / "sys/class/net")


def _infiniband(folder: Path) -> Iterator[Finding]:
    """A state is written as `4: ACTIVE`. Ports in INIT and ARMED wait for the subnet manager."""
    states = {
        f"{state.parts[-4]}/{state.parts[-2]}": _word(state)
        for state in sorted(folder.glob("*/ports/*/state"))
    }
    if not states:
        return
    wrong = {port: word for port, word in states.items() if word != "ACTIVE"}
    active = len(states) - len(wrong)
    if not wrong:
        yield Finding(what="infiniband", verdict="ok", found=f"{active} ports active")
        return
    words = ", ".join(f"{port} {word}" for port, word in wrong.items())
    yield Finding(
        what="infiniband",
        verdict="warns",
        found=f"{active} of {len(states)} ports active: {words}",
        fix="check cable and subnet manager (`ibstat`), or set NCCL_IB_HCA to active ports",
    )


def _ethernet(folder: Path) -> Iterator[Finding]:
    """Physical interfaces that are enabled but have no link."""
    cards = [card for card in sorted(folder.glob("*")) if (card / "device").exists()]
    wanted = [card for card in cards if int(_text(card / "flags") or "0", 16) & ADMIN_UP]
    down = [card.name for card in wanted if _text(card / "operstate") in ("down", "lowerlayerdown")]
    if not down:
        if wanted:
            found = f"{', '.join(card.name for card in wanted)} up"
            yield Finding(what="network", verdict="ok", found=found)
        return
    yield Finding(
        what="network",
        verdict="warns",
        found=f"{', '.join(down)} enabled but without a link",
        fix="check the cable and the switch port (`ip link`)",
    )


def _word(state: Path) -> str:
    return _text(state).partition(":")[2].strip() or "unknown"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a port that vanishes, or one that the driver does not answer for
        return ""
