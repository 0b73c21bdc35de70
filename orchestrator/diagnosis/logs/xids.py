"""Failure classes of Xids, the error numbers of NVIDIA's driver.

`xids.yaml` is NVIDIA's catalog with the immediate action for each. This module says what that means
for a job: if the GPU must be reset or the host rebooted, the host is unusable until a person has
done so. If only the program must be restarted, the host stays usable.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.contract.spec.failures import FailureRule, Remedy, Scope

TABLE = Path(__file__).with_name("xids.yaml")
SOURCE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
IGNORE = "IGNORE"


class Xid(Struct, frozen=True, kw_only=True):
    code: int
    mnemonic: str
    action: str
    """NVIDIA's immediate action; empty: the catalog has none."""
    says: str


class _Table(Struct, frozen=True, kw_only=True):
    codes: tuple[Xid, ...]


class _Class(Struct, frozen=True, kw_only=True):
    name: str
    scope: Scope
    action: Remedy
    advice: str
    symptom: bool = False


def _broken(name: str, advice: str) -> _Class:
    return _Class(name=name, scope="host", action="replace", advice=advice)


RESET = "reset the GPU (nvidia-smi --gpu-reset), and reboot the host if that fails"
CLASSES: Mapping[int, _Class] = {
    79: _broken(
        "gpu-lost",
        "the GPU no longer responds; reboot the host, and check seating, power and PCIe",
    ),
    48: _broken(
        "xid-48-double-bit-ecc", "reset the GPU; run dcgmi diag -r 3 before you use it again"
    ),
    171: _broken(
        "xid-171-dram-ecc",
        "an uncorrectable error of the GPU's memory; reset it, run dcgmi diag -r 3",
    ),
    172: _broken(
        "xid-172-sram-ecc",
        "an uncorrectable error of the GPU's SRAM; reset it, and replace it if"
        " nvidia-smi -q shows that the SRAM threshold is exceeded",
    ),
    64: _broken("xid-64-row-remap-failed", "the GPU has no spare memory rows left; replace it"),
    95: _broken(
        "xid-95-uncontained-ecc",
        "an uncontained memory error; reset the GPU, and reboot the host if that fails",
    ),
    140: _broken(
        "xid-140-ecc-escape", "an uncorrectable memory error that is not marked; " + RESET
    ),
    156: _broken("xid-156-retirement", "a part of the GPU must be retired; " + RESET),
    119: _broken(
        "xid-119-gsp-timeout",
        "the GPU's system processor hangs; reset the GPU or reboot the host, and check for a"
        " newer driver",
    ),
    120: _broken(
        "xid-120-gsp-error",
        "the GPU's system processor failed; reset the GPU or reboot the host, and check for a"
        " newer driver",
    ),
    74: _broken(
        "xid-74-nvlink",
        "an NVLink failed; run nvidia-smi nvlink -e, and have the host's NVLinks checked",
    ),
    155: _broken("xid-155-nvlink-down", "an NVLink was taken down; " + RESET),
    136: _broken("xid-136-link-training", "an NVLink could not be trained; " + RESET),
    62: _broken("xid-62-halt", "the GPU's power unit halted; reset the GPU"),
    109: _broken(
        "xid-109-context-switch",
        "the GPU did not switch between programs in time; reset the GPU",
    ),
    46: _broken("xid-46-gpu-timeout", "the GPU stopped processing; " + RESET),
    110: _broken("xid-110-security-fault", "the GPU reports a security fault; " + RESET),
    143: _broken("xid-143-gpu-init", "the GPU could not be initialized; " + RESET),
    151: _broken("xid-151-key-rotation", "the GPU's keys could not be changed; reboot the host"),
    158: _broken("xid-158-fatal-timeout", "the GPU did not respond in time; " + RESET),
    167: _broken(
        "xid-167-pcie-timeout", "the GPU does not respond on PCIe; check its seating and slot"
    ),
    54: _broken(
        "xid-54-power-cable", "the GPU's auxiliary power is not connected; check the cable"
    ),
    94: _Class(
        name="xid-94-contained-ecc",
        scope="host",
        action="restart",
        advice="a memory error that hit this program alone; the row is remapped at the GPU's next"
        " reset",
    ),
    63: _Class(
        name="xid-63-row-remapped",
        scope="host",
        action="restart",
        advice="a memory row is remapped at the GPU's next reset; no program is affected",
        symptom=True,
    ),
    92: _Class(
        name="xid-92-ecc-rate",
        scope="host",
        action="restart",
        advice="many corrected memory errors; run diagnostics when the job is over",
    ),
    78: _Class(
        name="xid-78-vgpu-start",
        scope="host",
        action="restart",
        advice="a virtual GPU could not be started; its driver must match the host's",
    ),
    159: _Class(
        name="xid-159-chi-error",
        scope="host",
        action="restart",
        advice="an error between processor and GPU; look for the Xid before it; update the driver",
    ),
    31: _Class(
        name="xid-31-mmu-fault",
        scope="user",
        action="restart",
        advice="the program accessed an invalid address; if it repeats on one GPU, suspect the GPU",
    ),
    13: _Class(
        name="xid-13-exception",
        scope="user",
        action="restart",
        advice="a kernel of the program failed (compute-sanitizer finds it); if it repeats"
        " on one GPU, suspect the GPU",
    ),
    43: _Class(
        name="xid-43-reset-channel",
        scope="user",
        action="restart",
        advice="the driver closed the program's channel after an earlier error; see the rank's log",
    ),
    137: _Class(
        name="xid-137-nvlink-privilege",
        scope="rank",
        action="restart",
        advice="the program accessed invalid memory of a peer GPU; if it repeats on one GPU,"
        " suspect the GPU",
    ),
    45: _Class(
        name="xid-45-cleanup",
        scope="rank",
        action="restart",
        advice="the driver cleans up after a process that ended; look for the cause before it",
        symptom=True,
    ),
}
"""Xids with a class of their own. Causes come before their consequences."""
ENGINE = _Class(
    name="xid-engine-error",
    scope="rank",
    action="restart",
    advice="an engine of the GPU (copy, video, …) failed for this program; if it repeats on"
    " one GPU, suspect the GPU",
)
SUPPORT = _broken("xid-unusual", "NVIDIA's catalog says to contact the GPU's vendor")
CHANNEL = "ROBUST_CHANNEL_"
"""Prefix of mnemonics of errors of a program's channel to the GPU."""
XID = r"xid \([^)]*\): "
# From Blackwell on, messages say whether the error did harm: `145, RLW_RXPIPE Nonfatal XC0 …` did
# none.
NVLINK5 = range(144, 151)
RECOVERY = (
    rf"{XID}154,.* to 0x\w+ \((GPU Reset|Node Reboot|OS Reboot|System Reboot|Bus Reset"
    r"|Drain and Reset|PF FLR|Recover IMEX)",
)
TOLD_BY_WORDS = frozenset((*NVLINK5, 154))


@cache
def catalog() -> tuple[Xid, ...]:
    from orchestrator.yaml_document import decode_document, parse, read_text

    document = parse(read_text(TABLE, "it comes with ndctl"), str(TABLE))
    return decode_document(_Table, document).codes


def class_of(xid: Xid) -> _Class | None:
    """None: NVIDIA says that it can be ignored, or that the text of the message decides."""
    if xid.code in CLASSES:
        return CLASSES[xid.code]
    if xid.code in TOLD_BY_WORDS or xid.action in (IGNORE, ""):
        return None
    of_a_program = xid.action == "RESTART_APP" or xid.mnemonic.startswith(CHANNEL)
    return ENGINE if of_a_program else SUPPORT


def xid_rules() -> tuple[FailureRule, ...]:
    return tuple(_rules())


def _rules() -> Iterator[FailureRule]:
    codes = {xid.code: xid for xid in catalog()}
    known = {code: one for code, xid in codes.items() if (one := class_of(xid)) is not None}
    for code, one in CLASSES.items():
        if code == 94:  # after all errors that break a host, before those of the program itself
            # A reported error goes before an Xid 45 that only refers to one.
            for harmful in (
                r"{xid}{number},.* Fatal\b",
                # A harmless error ends no program, so a program that was cleaned up after this
                # one met a harmful form of it.
                r"{xid}45\b.*caused by previous xid {number}\b",
            ):
                for number in NVLINK5:
                    pattern = harmful.format(xid=XID, number=number)
                    name = f"xid-{number}-nvlink"
                    yield _told_by_words(name, (pattern,), CLASSES[74].advice, f"Xid {number}")
            yield _rule(SUPPORT, [n for n, other in known.items() if other is SUPPORT])
            advice = "the driver's message says what to do before you use the GPU again"
            yield _told_by_words("xid-154-recovery", RECOVERY, advice, "Xid 154")
        if code == 45:
            for number in (n for n, other in known.items() if other is ENGINE):
                yield _rule(replace(ENGINE, name=f"xid-{number}-engine-error"), [number])
        yield _rule(one, [code])


def _rule(one: _Class, codes: list[int]) -> FailureRule:
    numbers = "|".join(map(str, codes))
    return FailureRule(
        name=one.name,
        scope=one.scope,
        action=one.action,
        advice=one.advice,
        symptom=one.symptom,
        # The driver cleans up after other errors with Xid 45, and names the error.
        patterns=(
            rf"{XID}({numbers})\b",
            rf"{XID}45\b.*caused by previous xid ({numbers})\b",
        ),
        source=f"Xid {', '.join(map(str, codes))} of {SOURCE}",
    )


def _told_by_words(name: str, patterns: tuple[str, ...], advice: str, source: str) -> FailureRule:
    return FailureRule(
        name=name,
        scope="host",
        action="replace",
        advice=advice,
        patterns=patterns,
        source=f"{source} of {SOURCE}",
    )
