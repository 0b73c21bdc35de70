"""Every sample gets its class and no other, and the table of classes is complete."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.contract.codec import Invalid
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.classes import (
    FailureSigns,
    all_that_fit,
    classify,
    default_rules,
    families,
)

SAMPLES: list[dict[str, Any]] = yaml.load(
    (Path(__file__).parents[1] / "captured" / "failures" / "samples.yaml").read_text(),
    yaml.CSafeLoader,
)
LESS_SPECIFIC = {
    "data-loader": {"service-unreachable"},
    "shared-memory": {"data-loader"},
    "loader-worker-killed": {"data-loader"},
    "nccl-plugin-missing": {"nccl-invalid-usage"},
    "hub-access": {"permission"},
}
"""Class -> less specific classes that fit the same sample. For example, the frames above a
connection error say which component failed, and the signal that ended a data loader worker says
more than its end."""
GENERAL = {"python-exception", "abort", "scheduler-sigterm", "sigkill-from-outside", "segfault"}
"""Classes by how a process ended. A more specific class is meant to come first."""


def signs_of(sample: dict[str, Any]) -> FailureSigns:
    return FailureSigns(
        lines=tuple(sample["lines"]),
        signal=sample.get("signal"),
        exit_code=sample.get("exit_code"),
        kind=sample.get("kind"),
    )


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s['class']}: {s['lines'][0][:50]}")
def test_a_sample_gets_its_class_and_not_a_similar_one(sample: dict[str, Any]) -> None:
    signs = signs_of(sample)
    found = classify(signs)
    assert found is not None
    assert found.rule.name == sample["class"]
    words = [rule for rule in default_rules() if rule not in families()]
    names = {one.rule.name for one in all_that_fit(signs, words)}
    symptoms = {rule.name for rule in default_rules() if rule.symptom}
    # Besides its cause, a sample may match symptoms and the way the process ended, but nothing
    # else.
    assert names - {sample["class"]} <= GENERAL | symptoms | LESS_SPECIFIC.get(
        found.rule.name, set()
    )


@pytest.mark.parametrize(
    "line",
    [
        "python: can't open file '/srv/train.py': [Errno 2] No such file or directory",
        "/usr/bin/python3: No module named train",
        "Could not override 'trainer.gpus'.",
        "train.py: error: unrecognized arguments: --lrr 3",
    ],
)
def test_a_program_that_cannot_start_is_a_mistake_of_its_user(line: str) -> None:
    found = classify(FailureSigns(lines=(line,), exit_code=2))
    assert found is not None
    assert (found.rule.scope, found.line) == ("user", line)


def test_every_class_has_a_sample() -> None:
    xids = {name for name in (rule.name for rule in default_rules()) if name.startswith("xid-")}
    sampled = {sample["class"] for sample in SAMPLES}  # test_xids.py has all Xids
    assert {rule.name for rule in default_rules()} - xids == sampled - xids


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'", "build for CPUs"),
        ("CUDA error: system not yet initialized", "nvidia-fabricmanager"),
        ("429 Client Error: Too Many Requests for url: https://huggingface.co/x", "HF_HUB_OFFLINE"),
        ("Signal 7 (SIGBUS) received by PID 986", "/dev/shm"),
        ("[CUDA_ERROR_NOT_PERMITTED] operation not permitted in expression cuMemCreate", "IMEX"),
        ("Dataset 'x/y' is a gated dataset on the Hub. You must be authenticated.", "HF_TOKEN"),
        (
            "401 Client Error: Unauthorized for url: https://huggingface.co/x/y/config.json",
            "HF_TOKEN",
        ),
        ("If you are trying to access a private or gated repo, make sure you are", "its name"),
        ("403 Client Error: Forbidden for url: https://example.com/x", "read and write"),
        ("[rank0]: Error: network IBext_v8 not found.", "NCCL_NET"),
        ("Tokenizer class ChatGLMTokenizer does not exist or is not", "trust_remote_code"),
        ("reached monitoredBarrier, but received errors while waiting", "log of rank 0"),
    ],
)
def test_the_advice_names_what_to_type_or_look_at(line: str, words: str) -> None:
    found = classify(FailureSigns(lines=(line,)))
    assert found is not None
    assert words in found.rule.advice


@pytest.mark.parametrize(
    "line",
    [
        "Error: network training not found",
        "Error response from daemon: network training not found",
        "requests.exceptions.ConnectionError: Error: network host example.com not found.",
        "WARN Error: network  not found.",
    ],
)
def test_a_network_that_is_no_plugin_of_nccl_is_none(line: str) -> None:
    """Docker and Podman name their networks in nearly the same words. NCCL names none if it found
    none at all, which is not for NCCL_NET."""
    found = classify(FailureSigns(lines=(line,)))
    assert found is None or found.rule.name != "nccl-plugin-missing"


def test_what_python_raises_in_s3fs_is_no_mounted_file_system() -> None:
    raised = "  raised in s3fs/core.py: botocore.exceptions.ClientError: Region does not match."
    found = classify(FailureSigns(lines=(raised,)))
    assert found is not None
    assert found.rule.name == "service-unreachable"
    mounted = classify(FailureSigns(lines=("s3fs[71]: curl.cpp: ### CURLE error 28",)))
    assert mounted is not None
    assert mounted.rule.name == "storage-error"


def test_causes_have_priority_over_symptoms_in_one_log() -> None:
    lines = (
        "RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.1]:99",
        "OSError: [Errno 28] No space left on device",
    )
    found = classify(FailureSigns(lines=lines, signal="SIGABRT"))
    assert found is not None
    assert (found.rule.name, found.line) == ("disk-full", lines[1])


NCCL_SYSTEM = (
    "NCCL error in: NCCLUtils.cpp:93, unhandled system error, NCCL version 2.27.3",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
    "Last error:",
)
NCCL_USAGE = (
    "NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL",
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",
    "Last error:",
)
NCCL_CUDA = (
    "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Last error:",
)
NCCL_INTERNAL = (
    "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1269, internal error, NCCL version 2.14.3",
    "ncclInternalError: Internal check failed.",
    "Last error:",
)
SEMAPHORE = "sl = self._semlock = _multiprocessing.SemLock("
SHM = "Error while creating shared memory segment /dev/shm/nccl-CWmJbq (size 9637888)"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ((*NCCL_SYSTEM, f"{SHM}, error: No space left on device (28)"), "shared-memory"),
        ((*NCCL_SYSTEM, SHM), "shared-memory"),
        ((SEMAPHORE, "OSError: [Errno 28] No space left on device"), "shared-memory"),
        ((SEMAPHORE, "OSError: [Errno 30] Read-only file system"), "shared-memory"),
        ((*NCCL_SYSTEM, f"{SHM}, error: File exists (17)"), "nccl-system-error"),
        (
            (*NCCL_SYSTEM, "socketStartConnect: Connect to 10.0.0.9<43> failed : No route to host"),
            "peer-unreachable",
        ),
        (
            (*NCCL_SYSTEM, "socketStartConnect: Connect to 10.0.0.9<43> failed : Cannot assign"),
            "nccl-system-error",
        ),
        (
            (
                *NCCL_SYSTEM,
                "NET/IB : Got completion from peer 192.168.17.147<38560> with error 12, opcode 0,"
                " len 0, vendor err 129",
            ),
            "infiniband-error",
        ),
        ((*NCCL_USAGE, "Failed to initialize any NET plugin"), "no-network-device"),
        (
            (*NCCL_USAGE, "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"),
            "nccl-invalid-usage",
        ),
        ((*NCCL_CUDA, "Failed to CUDA calloc async 608 bytes"), "cuda-out-of-memory"),
        ((*NCCL_CUDA, "Cuda failure 2 'out of memory'"), "cuda-out-of-memory"),
        ((*NCCL_INTERNAL, "Failed to CUDA calloc async 1920 bytes"), "cuda-out-of-memory"),
        (
            (
                "NCCL WARN Cuda failure 'an illegal memory access was encountered'",
                "NCCL WARN Failed to CUDA calloc async 608 bytes",
            ),
            "illegal-memory-access",
        ),
        ((*NCCL_CUDA, "Cuda failure 999 'unknown error'"), "gpu-lost"),
        ((*NCCL_CUDA, "Cuda failure 802 'system not yet initialized'"), "gpu-lost"),
        ((*NCCL_CUDA, "Cuda failure 1 'invalid argument'"), "nccl-cuda-error"),
        (("OSError: [Errno 28] No space left on device: '/scratch/x'",), "disk-full"),
        (("OSError: [Errno 28] Kein Speicherplatz mehr verfügbar: '/scratch/x'",), "disk-full"),
        (("OSError: [Errno 28] Kein Speicherplatz mehr verfügbar: '/dev/shm/x'",), "shared-memory"),
        (
            ("RuntimeError: [enforce fail at inline_container.cc:9] . PytorchStreamReader failed",),
            "torn-checkpoint",
        ),
        (
            (
                "RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't "
                "allocate memory: you tried to allocate 64 bytes.",
            ),
            "host-out-of-memory",
        ),
        (("CheckpointException ranks:dict_keys([0])", "OSError: [Errno 5] x"), "storage-error"),
        (
            ("torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:",),
            "python-exception",
        ),
        (
            (
                "CheckpointException ranks:dict_keys([0])",
                "RuntimeError: PytorchStreamReader failed reading zip archive",
            ),
            "torn-checkpoint",
        ),
        (
            ("ConnectionError: HTTPSConnectionPool(x): [Errno 110] Connection timed out",),
            "service-unreachable",
        ),
        (("httpx.ConnectError: [Errno 111] Connection refused",), "service-unreachable"),
        (("ConnectError: [Errno -3] Temporary failure in name resolution",), "service-unreachable"),
        (("httpx.ReadTimeout: The read operation timed out",), "service-unreachable"),
        (("ServerDisconnectedError: Server disconnected",), "service-unreachable"),
        (("tarfile.ReadError: unexpected end of data",), "data-error"),
        (
            (
                "RuntimeError: Caught RuntimeError in DataLoader worker process 0.",
                "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='x', port=443):",
            ),
            "service-unreachable",
        ),
        (("KeyError: Caught KeyError in DataLoader worker process 0.",), "data-error"),
        (
            (
                "OSError: Caught OSError in DataLoader worker process 0.",
                "OSError: [Errno 5] Input/output error",
            ),
            "storage-error",
        ),
        (
            (
                "CheckpointException ranks:dict_keys([3])",
                "Traceback (most recent call last): (RANK 3)",
                "ConnectionResetError: [Errno 104] Connection reset by peer",
            ),
            "service-unreachable",
        ),
        (
            (
                "CheckpointException ranks:dict_keys([3])",
                "Traceback (most recent call last): (RANK 3)",
                "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read"
                " error [127.0.0.1]:20878: Connection reset by peer.",
            ),
            "gloo-connection",
        ),
        (
            ("RuntimeError: [c10d] sendBytes failed on SocketImpl(fd=3): Broken pipe",),
            "gloo-connection",
        ),
        (
            ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Aborted.",),
            "data-loader",
        ),
    ],
)
def test_the_underlying_cause_differs_from_the_component_that_reports_it(
    lines: tuple[str, ...], name: str
) -> None:
    found = classify(FailureSigns(lines=lines, exit_code=1, kind="exception"))
    assert found is not None
    assert found.rule.name == name


def test_a_users_rule_has_priority() -> None:
    own = FailureRule(
        name="licence-server", scope="fabric", action="restart", patterns=("licence .* refused",)
    )
    signs = FailureSigns(lines=("RuntimeError: licence 7 refused by peer: Connection refused",))
    assert classify(signs, (own,)) is not None
    assert classify(signs, (own,)).rule is own  # type: ignore[union-attr]


def test_a_rule_for_one_phase_does_not_match_in_another() -> None:
    rule = FailureRule(
        name="slow-start", scope="user", action="stop", patterns=("too slow",), phases=("init",)
    )
    line = ("too slow",)
    assert all_that_fit(FailureSigns(lines=line, phase="init"), [rule])
    assert all_that_fit(FailureSigns(lines=line), [rule])
    assert not all_that_fit(FailureSigns(lines=line, phase="train"), [rule])


@pytest.mark.parametrize(
    "line",
    [
        "step 3  loss 2.2",
        # https://github.com/NVIDIA/nvtrust/issues/124
        "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion"
        " Link DLREQ interrupt",
        "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Severity 0 Engine instance"
        " 44 Sub-engine instance 00",
        # https://github.com/leptonai/gpud/pull/1160 and 1174
        "NVRM: Xid (PCI:0000:01:00): 144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x00000001 0x00000008"
        " 0x00000000 0x00000000 0x00000000 0x00000000)",
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008"
        " 0x00000001 0x00000000 0x00100000 0x00000004)",
        "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required)"
        " to 0x0 (None)",
        "NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to 0x3"
        " (Drain P2P)",
        # Errors that the kernel corrected or retried, and messages about a virtual drive
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
        "mce: [Hardware Error]: Machine check events logged",
        "{1}[Hardware Error]: event severity: corrected",
        "pcieport 0000:00:03.1: AER: Correctable error message received from 0000:00:00.0",
        "pcieport 0000:80:1b.4: AER: Uncorrectable (Non-Fatal) error message received from"
        " 0000:80:1b.4",
        "ahci 0000:01:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction",
        "nvme nvme0: I/O 900 (I/O Cmd) QID 2 timeout, aborting",
        "nfs: server 100.73.159.36 OK",
        "EXT4-fs (vdb): mounted filesystem 933e404a r/w with ordered data mode. Quota mode: none.",
        # fs/ext4/super.c of Linux repeats this every day for old errors
        "EXT4-fs (dm-0): error count since last fsck: 12",
        "EXT4-fs (dm-0): initial error at time 1478710351: ext4_mb_generate_buddy:756",
        "XFS (sdb5): Ending clean mount",
        "blk_update_request: I/O error, dev sr0, sector 0 op 0x0:(READ)",
        "Buffer I/O error on dev sr0, logical block 0, async page read",
        "Lustre: MGS: Connection restored to c7547940-8b66-9e67 (at 10.14.83.21@tcp)",
        "mlx5_core 0000:4b:00.0: Port module event: module 0, Cable plugged",
        # src/transport/net_ib/common.cc of https://github.com/NVIDIA/nccl
        "NCCL WARN NET/IB : mlx5_1:1 Got non-fatal async event: client reregistration(17)",
        "NCCL WARN NET/IB : mlx5_1:1 Got non-fatal async event: port active(9)",
        # src/transport/net_ib/p2p_resiliency.cc of NCCL, before another device takes over
        "NCCL INFO NET/IB: ncclIbResiliencyHandleCompletionError: Got completion with error"
        " (devIndex=0, wc->status=(IBV_WC_RETRY_EXC_ERR)12, wc->opcode=(IBV_WC_SEND)0",
    ],
)
def test_unknown_or_harmless_xids_have_no_class(line: str) -> None:
    assert classify(FailureSigns(lines=(line,), exit_code=3)) is None


def test_a_rule_that_cannot_match_is_refused_with_all_its_mistakes() -> None:
    with pytest.raises(Invalid) as caught:
        FailureRule(
            name="x", scope="rank", action="stop", unless=("x",), kinds=("y",), signals=("SIGNOPE",)
        )
    assert [one.path for one in caught.value.problems] == ["signals", "kinds", "unless"]
    with pytest.raises(Invalid):
        FailureRule(name="x", scope="rank", action="stop")
