"""A mention of a failure excludes no host. A report of a failure is used in any format."""

import pytest

from orchestrator.app.classification import classify_log

OWN = """Traceback (most recent call last):
  File "/opt/job/train.py", line 12, in <module>
    main()
ValueError: sequence does not divide"""

MENTIONS = (
    "health: if nvidia-smi says 'GPU is lost' the node is drained",
    "TIP: an uncorrectable ECC error means that the GPU has to be reset",
    "Config(on_errors=['CUDA_ERROR_ECC_UNCORRECTABLE', 'cudaErrorNvlinkUncorrectable'])",
    "retryable errors: uncorrectable ECC error|GPU has fallen off the bus|NVLink",
    "simulating Xid 79, GPU has fallen off the bus",
    "loaded rules: 'EDAC MC0: 1 UE memory', 'Kernel panic - not syncing'",
    "prompt: My GPU has fallen off the bus, what should I do?",
    "sample 3: dmesg says NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus",
    "decoded text: Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)",
    "input: CUDA error: unknown error as I run train.py",
    "Q: RuntimeError: CUDA unknown error. A: install the driver",
    "example 0: [1,2,3] -> 'RuntimeError: CUDA error: uncorrectable NVLink error detected",
    "  - GPU has fallen off the bus: 3 nodes last week",
    "excluded hosts: n12 (Xid 79: GPU has fallen off the bus)",
    "resumed; the previous run ended with: CUDA error: uncorrectable ECC error encountered",
    "restart 3 of 10, reason: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
    "check 0.9.4: a missing device is fatal now; addresses XID 79 (GPU has fallen off the bus)",
    "health: a GPU is drained if it has failed remapped rows",
)
REPORTS = (
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "torch.AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution",
    "pynvml.NVMLError_GpuIsLost: GPU is lost",
    "[   12.310001] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
    "Jul  8 10:12:31 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:3b:00): 48, pid=1, name=python3, DBE (double bit error) GPC 0 FBP 3",
    "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.  Reboot the system",
    "preflight: Failed to initialize NVML: Driver/library version mismatch",
    "2026-03-01 10:00:00,001 - worker - ERROR - batch 7 of the input: CUDA error: unknown error",
    "E0905 17:34:36.549102 2210 executor.cc:414] CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC",
    "n3:1:9 [0] enqueue.cc:10 NCCL WARN Cuda failure 'uncorrectable ECC error encountered'",
    "  error: RuntimeError('CUDA error: uncorrectable ECC error encountered')",
    '{"level": "error", "msg": "CUDA error: uncorrectable ECC error encountered"}',
    '{"time": 7, "exception": "CUDA error: uncorrectable ECC error encountered"}',
    "HW Exception by GPU node-5 (Agent handle: 0x1) reason :GPU Hang",
    "Warning  GPUMemoryError  9s  gpu-manager  Message=The device has failed remapped rows",
)


@pytest.mark.parametrize("line", MENTIONS)
@pytest.mark.parametrize("end", [OWN, ""])
def test_a_mention_of_a_failure_excludes_no_host(line: str, end: str) -> None:
    found = classify_log(f"step 1 loss 10.9\n{line}\n{end}", exit_code=1)
    assert not found.excludes_host, found
    assert found.class_ in (("python-exception",) if end else ("unknown", None))


@pytest.mark.parametrize("line", REPORTS)
def test_a_report_is_used_next_to_an_exception_of_the_program(line: str) -> None:
    found = classify_log(f"step 1 loss 10.9\n{line}\n{OWN}", exit_code=1)
    assert found.excludes_host, found


XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
SAMPLES = {
    "fence": f"completion of step 1\n```\n{XID}\n{ECC}\n```\nso reset it",
    "turn": f"<|im_start|>user\nWhat is this?\n{XID}\n{ECC}\n<|im_end|>",
    "speaker": f"user: what is wrong here?\n{XID}\nassistant: it says\n{ECC}",
    "heading": f"Question: why?\n{ECC}\nAnswer: memory",
    "bracket": f"[prompt] Why does it fail?\n{ECC}\n[response] reset",
    "reply": f"> {XID}\n> {ECC}",
    "row": f"| 3 | {ECC} | 0.4 |",
    "box": f"\u2502 {ECC} \u2502",
    "record": f"17\t{ECC}",
    "page": f"<pre>{ECC}</pre>",
}
"""What a program prints of its data, in the forms of trainers."""


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("end", [OWN, ""])
def test_a_printed_sample_of_the_data_excludes_no_host(kind: str, end: str) -> None:
    found = classify_log(f"step 1 loss 10.9\n{SAMPLES[kind]}\nstep 2 loss 9\n{end}", exit_code=1)
    assert not found.excludes_host, found


@pytest.mark.parametrize("kind", ["fence", "turn", "speaker", "heading", "bracket"])
def test_a_report_below_a_sample_is_used(kind: str) -> None:
    raised = f'Traceback (most recent call last):\n  File "/opt/job/train.py", line 3\n{ECC}'
    found = classify_log(f"step 1 loss 10.9\n{SAMPLES[kind]}\n{raised}", exit_code=1)
    assert found.class_ == "uncorrectable-ecc"
    assert found.excludes_host


def test_a_sample_without_an_end_hides_no_report() -> None:
    for begin in ("```", "<|im_start|>user"):
        assert classify_log(f"{begin}\nWhy?\n{ECC}", exit_code=1).excludes_host


def test_a_log_that_begins_inside_of_a_sample_excludes_no_host() -> None:
    found = classify_log(f"cut here\n```\nso reset it\n```\n{ECC}\n```\n{OWN}", exit_code=1)
    assert not found.excludes_host, found
