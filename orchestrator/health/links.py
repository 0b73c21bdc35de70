"""Network ports of a host, as the kernel lists them below /sys/class.

A port that is down may be one that nobody has cabled, so none of it makes a host unfit: it warns,
and the small all-reduce of all hosts decides.
"""

from collections.abc import Iterator
from pathlib import Path

from orchestrator.contract.check_results import Finding

ADMIN_UP = 0x1
"""IFF_UP: somebody wants this interface to work."""


def examine_links(root: Path) -> Iterator[Finding]:
    yield from _infiniband(root / "sys/class/infiniband")
    yield from _ethernet(root / "sys/class/net")


def _infiniband(folder: Path) -> Iterator[Finding]:
    """States read `4: ACTIVE`; INIT and ARMED wait for the subnet manager."""
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
        fix="see `ibstat`: a cable, or the subnet manager; name the good ones in NCCL_IB_HCA",
    )


def _ethernet(folder: Path) -> Iterator[Finding]:
    """Interfaces with hardware behind them that are switched on."""
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
        found=f"{', '.join(down)} switched on without a link",
        fix="see the cable and the switch's port: `ip link`",
    )


def _word(state: Path) -> str:
    return _text(state).partition(":")[2].strip() or "unknown"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a port that vanishes, or one that the driver does not answer for
        return ""
