"""Decides whether a node is free for a job, by its state, its flags and the GPUs in use."""

from collections.abc import Mapping

from msgspec import Struct

from orchestrator.inventory.hosts import State
from orchestrator.inventory.slurm.nodes import Node

GIVEN_UP: Mapping[str, str] = {
    "DRAIN": "drained",
    "FAIL": "failing",
    "NOT_RESPONDING": "not responding",
    "INVALID_REG": "does not match slurm.conf",
    "MAINTENANCE": "in maintenance",
    "REBOOT_ISSUED": "reboots",
    "POWER_DOWN": "is about to be powered down",
    "POWERING_DOWN": "is being powered down",
}
"""Flags of a node on which the administrator wants no new work, in words."""
BEGINS = ("MAINTENANCE", "REBOOT_ISSUED")
"""Flags of nodes that the administrator works on now, whatever still runs there."""
TAKEN: Mapping[str, str] = {
    "COMPLETING": "a job is ending there",
    "PLANNED": "kept for a job in the queue",
    "BLOCKED": "blocked by a job with exclusive use of its block",
    "REBOOT_REQUESTED": "reboots when it is idle",  # with ASAP it also has DRAIN
}
BASES: Mapping[str, tuple[State, str]] = {
    "IDLE": ("free", ""),
    "ALLOCATED": ("busy", "allocated"),
    "MIXED": ("free", ""),
    "DOWN": ("drained", "down"),
    "ERROR": ("drained", "in error"),
    "FUTURE": ("drained", "not available yet"),
    "UNKNOWN": ("drained", "its state is unknown"),
}


class Standing(Struct, frozen=True, kw_only=True):
    state: State
    reason: str = ""
    """Why it is not free: in Slurm's words, with the administrator's note."""
    gpus: int = 0
    """On a free host the GPUs that the job may use, else all."""


def standing_of(node: Node, *, exclusive: bool = False, reservation: str | None = None) -> Standing:
    """`exclusive`: the job needs whole hosts; `reservation`: the one that the job runs in."""
    if node.state == "IDLE" and not node.flags:
        return Standing(state="free", gpus=node.gpus)  # the usual case, for thousands of nodes
    state, why = BASES.get(node.state, ("drained", f"in an unknown state: {node.state}"))
    # Flags of the administrator come first: a node with DRAIN may be IDLE, but nothing starts
    # there.
    if given_up := [words for flag, words in GIVEN_UP.items() if _counts(flag, node, reservation)]:
        return Standing(state="drained", reason=_said(given_up[0], node), gpus=node.gpus)
    if state == "drained":
        return Standing(state=state, reason=_said(why, node), gpus=node.gpus)
    # A reserved node is idle but only jobs of its reservation can use it.
    if "RESERVED" in node.flags and not _is_of(node, reservation):
        why = f"reserved: {node.reservation}" if node.reservation else "reserved"
        return Standing(state="busy", reason=why, gpus=node.gpus)
    for flag, words in TAKEN.items():
        if flag in node.flags:
            return Standing(state="busy", reason=words, gpus=node.gpus)
    if state == "busy":
        return Standing(state=state, reason=why, gpus=node.gpus)
    return (
        _shared(node, exclusive)
        if node.state == "MIXED"
        else Standing(state="free", gpus=node.gpus)
    )


def is_wanted_back(node: Node, reservation: str | None) -> bool:
    """Whether a running job should leave the node, because its administrator or Slurm took it back.

    A slurmd that does not respond is no reason: it may be stopped for an upgrade while its jobs run
    on. If the node is dead, the silence of the agent shows it sooner.
    """
    return node.is_gone or any(
        _counts(flag, node, reservation) for flag in GIVEN_UP if flag != "NOT_RESPONDING"
    )


def lets_finish(node: Node, reservation: str | None) -> bool:
    """For a node that is taken back: whether Slurm waits for running work to finish."""
    return not node.is_gone and not any(_counts(flag, node, reservation) for flag in BEGINS)


def _counts(flag: str, node: Node, reservation: str | None) -> bool:
    if flag == "MAINTENANCE" and _is_of(node, reservation):
        return False  # the job runs in this very reservation
    return flag in node.flags


def _is_of(node: Node, reservation: str | None) -> bool:
    """Whether a node is reserved for this job. Slurm 22.05 does not report for whom."""
    return reservation is not None and node.reservation in (reservation, None)


def _said(words: str, node: Node) -> str:
    return f"{words}: {node.reason}" if node.reason else words


def _shared(node: Node, exclusive: bool) -> Standing:
    """For a node of which other jobs use a part."""
    if exclusive:
        return Standing(state="busy", reason="other jobs use a part of it", gpus=node.gpus)
    # Without GPU accounting, a mixed node may have no GPU left, so do not plan with it.
    if node.gpus and node.gpus_used is None:
        return Standing(state="busy", reason="other jobs use an unknown part of it", gpus=node.gpus)
    left = node.gpus - (node.gpus_used or 0)
    if node.gpus and left <= 0:
        return Standing(state="busy", reason="other jobs use all its GPUs", gpus=node.gpus)
    return Standing(state="free", gpus=left)
