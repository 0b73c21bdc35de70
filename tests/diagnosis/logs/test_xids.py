"""The class of every Xid agrees with the recovery action in NVIDIA's catalog."""

import pytest

from orchestrator.app.classification import classify_log
from orchestrator.diagnosis.classes import FailureSigns, all_that_fit, classify, default_rules
from orchestrator.diagnosis.logs.xids import CLASSES, IGNORE, TOLD_BY_WORDS, Xid, catalog

BROKEN = {"RESET_GPU", "RESTART_BM", "RESTART_VM", "WORKFLOW_XID_48", "CHECK_MECHANICALS"}
"""Actions that NVIDIA requires before the GPU is used again."""
WITHOUT_ACTION = {167, 171, 172}
"""The catalog lists no action for the newest codes. The names of these say uncorrectable."""
HARMLESS = "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from {} to {}"


def line(code: int, rest: str = "pid=77, name=python") -> str:
    return f"[ 7.1] NVRM: Xid (PCI:0000:1b:00): {code}, {rest}"


@pytest.mark.parametrize("xid", catalog(), ids=lambda xid: f"{xid.code}-{xid.action}")
def test_every_xid_with_a_recovery_action_has_a_class(xid: Xid) -> None:
    found = classify(FailureSigns(lines=(line(xid.code),)))
    excluded = classify_log("", kernel=line(xid.code)).excludes_host
    if xid.action in BROKEN or xid.code in WITHOUT_ACTION:
        assert found is not None
        assert (found.rule.scope, found.rule.action, excluded) == ("host", "replace", True)
    elif xid.action == "RESTART_APP":
        assert found is not None
        assert (found.rule.action, excluded) == ("restart", False)
    elif xid.action == IGNORE:
        assert not excluded
        assert found is None or found.rule.action == "restart"
    else:
        assert found is not None or xid.code in TOLD_BY_WORDS or not xid.action


def test_the_catalog_is_complete() -> None:
    assert [xid.code for xid in catalog()] == list(range(1, 173))
    assert set(CLASSES) <= {xid.code for xid in catalog()}


@pytest.mark.parametrize("code", [46, 110, 136, 140, 143, 151, 155, 156, 158, 167, 171, 172, 79])
def test_the_class_is_that_of_the_error_before_the_cleanup(code: int) -> None:
    # src/nvidia/src/kernel/gpu/rc/kernel_rc_notification.c of open-gpu-kernel-modules
    after = line(45, f"pid=77, name=python, Ch 00000008 caused by previous Xid {code}")
    found, of_itself = (
        classify(FailureSigns(lines=(after,))),
        classify(FailureSigns(lines=(line(code),))),
    )
    assert found is not None
    assert of_itself is not None
    assert found.rule is of_itself.rule
    assert classify_log("", kernel=after).excludes_host


def test_a_cleanup_xid_without_a_harmful_one_breaks_no_host() -> None:
    for rest in ("pid=77, name=python, Ch 00000008", "Ch 08 caused by previous Xid 13"):
        assert not classify_log("", kernel=line(45, rest)).excludes_host


@pytest.mark.parametrize(
    ("to", "excluded"),
    [
        ("0x0 (None)", False),
        ("0x1 (GPU Reset Required)", True),
        ("0x2 (Node Reboot Required)", True),
        ("0x3 (Drain P2P)", False),
        ("0x4 (Drain and Reset)", True),
    ],
)
def test_the_recovery_action_is_read_from_its_text(to: str, excluded: bool) -> None:
    for former in ("0x0 (None)", "0x1 (GPU Reset Required)"):
        said = classify_log("", kernel=HARMLESS.format(former, to))
        assert (said.excludes_host, said.class_ == "xid-154-recovery") == (excluded, excluded)


def test_fatal_nvlink_errors_are_marked_as_fatal() -> None:
    words = "RLW_RXPIPE {} XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x1 0x0 0x00100000 0x4)"
    for code in range(144, 151):
        assert classify_log("", kernel=line(code, words.format("Fatal"))).excludes_host
        assert not classify_log("", kernel=line(code, words.format("Nonfatal"))).excludes_host


def test_no_other_rule_matches_the_xid_numbers() -> None:
    rules = [rule for rule in default_rules() if not rule.name.startswith("xid-")]
    for xid in catalog():
        fits = all_that_fit(FailureSigns(lines=(line(xid.code),)), rules)
        named = [one.rule.name for one in fits]
        assert [name for name in named if name != "unknown"] == ["gpu-lost"] * (xid.code == 79)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "[  360.406580] NVRM: Xid (PCI:0000:00:06): 43, pid=1119, name=python3, channel"
            " 0x0000000a",
            "xid-43-reset-channel",
        ),
        (
            "[  365.926895] NVRM: Xid (PCI:0000:00:06): 31, pid=1141, name=python3, channel"
            " 0x0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC0 GPCCLIENT_T1_8 faulted @"
            " 0x8314_dfe00000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
            "xid-31-mmu-fault",
        ),
    ],
    ids=["device-side assert", "illegal address"],
)
def test_an_error_of_a_program_on_an_h200_excludes_no_host(line: str, name: str) -> None:
    """The kernel logs of an H200 (driver 580.159) after these errors of a program."""
    found = classify_log("", kernel=line)
    assert (found.class_, found.action, found.excludes_host) == (name, "restart", False)
