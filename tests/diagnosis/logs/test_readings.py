"""Any text of a rank is classified in linear time, and normal messages have no class."""

import random
import string
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from orchestrator.contract.messages.events import RankError
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.classes import default_rules, with_class
from orchestrator.diagnosis.logs import last_words
from orchestrator.diagnosis.logs.patterns import (
    LARGEST,
    MOST_BYTES,
    MOST_LINES,
    Text,
    bounded,
    compiled,
    problem_of,
)
from orchestrator.diagnosis.logs.readings import (
    DIRECT_CAUSE,
    MOST_KEPT,
    End,
    kept_lines,
    read_exit,
    read_kernel,
)

SIZE = 8000
"""Size in bytes of the texts that are timed."""
WORDS = sorted(
    {
        word
        for rule in default_rules()
        for pattern in rule.patterns
        for word in "".join(c if c.isalnum() or c in "_/:." else " " for c in pattern).split()
        if len(word) > 2
    }
)


def ends(text: str) -> list[End]:
    """Exits of a rank that wrote this text."""
    lines = tuple(text.splitlines())
    raised = RankError(error="RuntimeError", message=text, step=1, traceback=text)
    return [
        End(exit_code=None, signal=6, lines=lines),
        End(exit_code=1, signal=None, lines=lines),
        End(exit_code=1, signal=None, error=raised),
        End(exit_code=None, signal=9, lines=lines),
    ]


LOST_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:6"
IN_A_STAGE = f"""Traceback (most recent call last):
  File "/site-packages/torch/distributed/pipelining/stage.py", line 892, in forward_one_chunk
    output = self.forward_maybe_with_nosync(*composite_args)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/home/a/ring.py", line 32, in wait
    work.wait()
{LOST_PEER}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/site-packages/torch/distributed/pipelining/stage.py", line 900, in forward_one_chunk
    raise RuntimeError(exc_msg) from e
RuntimeError:
            [Stage 0] failed to run forward:
            args: ('Tensor(torch.Size([4, 32]), grad=False, dtype=torch.int64)',)
            kwargs: {{}}
"""


def test_a_stage_that_failed_because_of_a_lost_peer_is_no_cause() -> None:
    message = IN_A_STAGE.rpartition("RuntimeError:")[2]
    error = RankError(error="RuntimeError", message=message, step=7, traceback=IN_A_STAGE)
    reading = read_exit(End(exit_code=1, signal=None, error=error))
    assert reading.symptom
    assert reading.failure is not None
    assert (reading.failure.name, reading.failure.line) == ("gloo-connection", LOST_PEER)

    own = IN_A_STAGE.replace(LOST_PEER, "ValueError: a batch of 3 cannot be divided")
    reading = read_exit(End(exit_code=1, signal=None, error=replace(error, traceback=own)))
    assert not reading.symptom
    assert reading.failure is not None
    assert reading.failure.name == "python-exception"


@pytest.mark.parametrize(
    ("name", "message", "class_name"),
    [
        ("BadShard", "shard 7 has no text", "python-exception"),
        ("ExceptionGroup", "several (2 sub-exceptions)", "python-exception"),
        ("UserWarning", "lr_scheduler.step() before optimizer.step()", "python-exception"),
        ("Odd", "", "python-exception"),
        ("KeyboardInterrupt", "", "interrupted"),
    ],
)
def test_an_exception_with_an_unusual_name_or_no_message_has_the_class_that_its_log_has(
    name: str, message: str, class_name: str
) -> None:
    text = f"Traceback (most recent call last):\n{name}{message and ': '}{message}"
    error = RankError(error=name, message=message, step=0, traceback=text)
    for end in (
        End(exit_code=1, signal=None, error=error),
        End(exit_code=1, signal=None, lines=tuple(text.splitlines())),
    ):
        failure = read_exit(end).failure
        assert failure is not None
        assert failure.name == class_name


def cpu_seconds(end: End, rules: tuple[FailureRule, ...] = ()) -> float:
    """The minimum of three tries, because the CPU is shared and the first try may build tables."""
    read = read_exit.__wrapped__
    taken = []
    for _ in range(3):
        begun = time.thread_time()
        read(end, rules)
        taken.append(time.thread_time() - begun)
    return min(taken)


def times_ordinary(text: str) -> float:
    """CPU time to classify exits with this text, in times of that for a real traceback of the same
    size (5 to 9 ms). A limit in seconds would test the machine: one CPU takes twice as long at
    times."""
    ordinary = (IN_A_STAGE * (SIZE // len(IN_A_STAGE) + 1))[:SIZE]
    return max(map(cpu_seconds, ends(text))) / max(map(cpu_seconds, ends(ordinary)))


READ_BEFORE = read_exit(End(exit_code=1, signal=None, lines=("Traceback (most recent",)))
SPREAD = random.Random(17)
HOSTILE = {
    "a name without its end": "mlx5_" * 1600,
    "one letter": "x" * 8000,
    "one letter of the user's": "a" * 8000,
    "timeouts": "timeout " * 1000,
    "empty lines": "\n" * 8000,
    "short lines": "x\n" * 4000,
    "tabs": "\t" * 8000,
    "quotes": '  File "' * 1000,
    "causes": f"Traceback (most recent call last):\nE: x\n{DIRECT_CAUSE}\n" * 36,
    "brackets": "Xid (" * 1600,
    "numbers": "1" * 8000,
    "asserts": "Assertion " * 800,
    "tracebacks": "Traceback (most recent call last):\n" * 228,
    "frames": "frame #0: c10::Error::Error(c10::SourceLocation)\n" * 160,
    "retries": "Retrying (Retry(" * 500,
    "escapes": "\x1b[" * 4000,
    "prefixes": "[rank0]: " * 888,
    "connections": "connect to 10.0.0." * 444,
    "steps": "step 3 loss 2.2\n" * 500,
    "names of all classes": " ".join(WORDS)[:8000],
    "names of all classes, mixed": " ".join(SPREAD.choices(WORDS, k=1400))[:8000],
    "names of all classes in lines": "\n".join(SPREAD.choices(WORDS, k=1400))[:8000],
    "noise": "".join(SPREAD.choices(string.printable, k=8000)),
    "noise of all scripts": "".join(chr(SPREAD.randrange(32, 0x3000)) for _ in range(2700)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_longer_than_three_times_an_ordinary_one(name: str) -> None:
    assert times_ordinary(HOSTILE[name]) < 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=12)), min_size=1, max_size=30),
    st.sampled_from(["", " ", "_", "\n"]),
)
def test_no_text_built_from_the_patterns_takes_longer_than_ten_times_an_ordinary_one(
    words: list[str], between: str
) -> None:
    """Random words defeat the caches of the regex engine, which takes a constant factor longer. A
    pattern that backtracks would take seconds."""
    piece = between.join(words) or "x"
    text = (piece * (SIZE // len(piece) + 1)).encode(errors="replace")[:SIZE]
    assert times_ordinary(text.decode(errors="replace")) < 10


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=3000), max_size=30))
def test_the_kept_part_of_a_text_has_a_limit(lines: list[str]) -> None:
    kept = bounded(line.replace("\n", " ") for line in lines)
    assert sum(len(line.encode(errors="replace")) + 1 for line in kept) <= MOST_BYTES
    assert bounded(kept) == kept
    text = Text.of(lines)
    assert text.pick(range(len(text.lines))) == text


def test_every_default_pattern_is_valid_and_matches_within_one_line() -> None:
    names = [name for name in dir(last_words) if name.isupper()]
    ours = [getattr(last_words, name) for name in names]
    patterns = {p for group in ours if isinstance(group, tuple) for p in group}
    patterns |= {p for rule in default_rules() for p in (*rule.patterns, *rule.unless)}
    assert [(p, why) for p in patterns if (why := problem_of(p))] == []
    found = compiled((r"a[^b]*c|x\s+y",))
    assert found.search(b"a\nc\nx\ny") is None
    assert found.search(b"a-c") is not None


@pytest.mark.parametrize(
    ("pattern", "fix"),
    [
        ("(?=x)y", "look-ahead"),
        ("^(?!.*x)y", "unless"),
        ("(?<=x)y", "look-behind"),
        (r"(a)\1", "back-reference"),
        ("(", "put \\ before"),
        (r"\w{0,1000}", "write .*"),
        ("(a|b|c){900}", "write .*"),
    ],
)
def test_a_pattern_that_the_engine_does_not_support_is_refused_with_a_fix(
    pattern: str, fix: str
) -> None:
    wrong = problem_of(pattern)
    assert wrong is not None
    assert fix in wrong[1]


def test_patterns_that_backtrack_in_re_are_fast_here() -> None:
    assert problem_of("(a+)+$") is None
    rule = FailureRule(name="ours", scope="user", action="stop", patterns=("(a+)+$",))
    end = End(exit_code=1, signal=None, lines=("a" * SIZE + "!",))
    assert cpu_seconds(end, (rule,)) < 1, "re would take longer than anyone waits"
    assert LARGEST <= 1000


# Aborts whose decisive line comes before the frames of a stack

# https://github.com/pytorch/pytorch/issues/113128 and 126544, with what differs from rank to rank
SAID = (
    "[rank12]:[E817 17:40:34.227531918 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 12]"
    " Process group watchdog thread terminated with exception: CUDA error: {}",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "",
    "Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most"
    " recent call first):",
)
FRAME = "frame #{}: <unknown function> + 0xdc253 (0x7fefa6cb0253 in /lib/x86_64-linux-gnu/lib.so.6)"


def aborted(error: str, frames: int) -> tuple[str, ...]:
    return (
        *(f"step {n}  loss 2.2" for n in range(50)),
        *(line.format(error) for line in SAID),
        *(FRAME.format(n) for n in range(frames)),
        "",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        *(FRAME.format(n) for n in range(frames)),
    )


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("uncorrectable ECC error encountered", "uncorrectable-ecc"),
        ("uncorrectable NVLink error detected during the execution", "nvlink-error"),
        ("an illegal memory access was encountered", "illegal-memory-access"),
        ("misaligned address", "illegal-memory-access"),
        ("unspecified launch failure", "illegal-memory-access"),
        ("unknown error", "gpu-lost"),
    ],
)
@pytest.mark.parametrize("frames", [0, 20, 100])
@pytest.mark.parametrize("prefix", ["", "[default0]:", "(RayWorkerVllm pid=5304) "])
def test_frames_of_a_stack_do_not_hide_a_gpu_error(
    error: str, name: str, frames: int, prefix: str
) -> None:
    lines = tuple(f"{prefix}{line}" for line in aborted(error, frames))
    reading = read_exit(End(exit_code=None, signal=6, lines=lines))
    assert reading.failure is not None
    assert (reading.failure.name, reading.symptom) == (name, False)
    kept = kept_lines(lines, reading)
    assert len(kept) <= MOST_KEPT
    assert reading.failure.line in kept
    assert not any("frame #" in line for line in kept)


def test_survived_errors_do_not_explain_an_exit_without_a_traceback() -> None:
    old = (
        "wandb: Network error (ConnectionError), entering retry loop.",
        "wandb: W&B API key is configured. Use `wandb login --relogin` to force relogin",
        "n7:71:99 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so:"
        " cannot open shared object file: No such file or directory.",
        "WARNING:urllib3.connectionpool:Retrying (Retry(total=2)) after connection broken by"
        " 'NewConnectionError('<urllib3.connection.HTTPSConnection object>: Connection refused')'",
        "[W612 12:00:00.1 socket.cpp:752] [c10d] The client socket has failed to connect to n7",
    )
    end = End(exit_code=3, signal=None, lines=(*old, "leaving"))
    found = read_exit(end).failure
    assert found is not None
    assert found.name == "unknown"
    told = replace(end, lines=(*old, "OSError: [Errno 28] No space left on device: '/scratch/x'"))
    assert read_exit(told).failure.name == "disk-full"  # type: ignore[union-attr]


def test_errors_before_later_steps_are_not_the_cause() -> None:
    failed = "ERROR saving: OSError: [Errno 28] No space left on device: '/scratch/x'"
    steps = tuple(f"step {n}  loss 2.2" for n in range(9))
    end = End(exit_code=3, signal=None, lines=(failed, *steps))
    assert read_exit(end).failure.name == "unknown"  # type: ignore[union-attr]
    assert read_exit(replace(end, lines=(*steps, failed))).failure.name == "disk-full"  # type: ignore[union-attr]


OWN = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    main()",
)
TORCHRUN = (
    "Traceback (most recent call last):",
    '  File "/opt/conda/bin/torchrun", line 33, in <module>',
    "    sys.exit(main())",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "train.py FAILED",
)
PREFIXES = (
    "",
    "[rank1]: ",
    "[default1]:[rank1]: ",
    "3: ",
    "(RayTrainWorker pid=77, ip=10.0.0.7) ",
    "\x1b[36m(TrainTrainable pid=77)\x1b[0m ",
    "2024-05-01T12:00:00.000000000Z stderr F ",
    "(VllmWorker rank=1 pid=77) ERROR 05-01 12:00:00 [multiproc_executor.py:522] ",
)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_and_final_messages_of_a_launcher_do_not_hide_an_error(prefix: str) -> None:
    for said, ends, name in (
        ((*OWN, "torch.OutOfMemoryError: CUDA out of memory. Tried"), "1", "cuda-out-of-memory"),
        ((*OWN, "RuntimeError: shapes"), "1", "python-exception"),
        (("loading",), "-9 (pid: 7)", "sigkill-from-outside"),
        (("loading",), "-11 (pid: 7)", "segfault"),
    ):
        lines = (*said, *TORCHRUN, f"  exitcode  : {ends}")
        found = read_exit(End(exit_code=1, signal=None, lines=tuple(f"{prefix}{x}" for x in lines)))
        assert found.failure is not None
        assert found.failure.name == name


def test_the_exit_code_of_a_shell_gives_the_signal() -> None:
    for code, name in ((137, "sigkill-from-outside"), (139, "segfault"), (134, "abort")):
        found = read_exit(End(exit_code=code, signal=None)).failure
        assert found is not None
        assert found.name == name


def test_a_long_kernel_log_is_classified() -> None:
    xid = "[ 51.0] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus."
    many = [f"[ {n}.0] audit: type=1400 audit(1) " + "x" * 900 for n in range(3000)]
    many[1234] = xid
    assert list(with_class(many)) == [xid]
    assert [one.name for one in read_kernel([xid, *many[:3]])] == ["gpu-lost"]


def test_in_a_kernel_log_broken_hardware_outweighs_a_failed_program() -> None:
    program = "NVRM: Xid (PCI:0000:63:00): 31, pid=7, name=python, MMU Fault: ENGINE GR_HOST0"
    broken = "pcieport 0000:62:00.0: AER: device recovery failed"
    read = [one.name for one in read_kernel([program, broken])]
    assert read == ["pcie-error", "xid-31-mmu-fault"]


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: GPU0 _kgspProcessRpcEvent: Attempted to process RPC event from GPU0 during bootup",
        "NVRM: GPU0 nvAssertFailedNoLog: Assertion failed: 0 @ kernel_gsp.c:1447",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build",
        "mlx5_core 0000:d2:00.0: mlx5_cmd_out_err:838:(pid 7): ACCESS_REG(0x805) failed, status",
        "mlx5_core 0000:13:00.0: PCIe slot power capability was not advertised.",
        "md/raid1:md127: active with 2 out of 2 mirrors",
        "MCi status: Error enabled",
    ],
)
def test_normal_messages_of_drivers_have_no_class(line: str) -> None:
    assert read_kernel([line]) == ()


def test_every_sample_has_the_same_class_at_the_end_of_a_log() -> None:
    """At the end of a longer log, a sample has the class that it has alone."""
    path = Path(__file__).parents[2] / "captured" / "failures" / "samples.yaml"
    steps = tuple(f"step {n}  loss 2.2" for n in range(30))
    wrong = []
    for sample in yaml.load(path.read_text(), yaml.CSafeLoader):
        if set(sample) - {"class", "source", "lines"} or not sample["lines"]:
            continue
        end = End(exit_code=1, signal=None, lines=(*steps, *sample["lines"]))
        found = read_exit(end).failure
        if found is None or found.name != sample["class"]:
            wrong.append((sample["class"], found and found.name, sample["lines"]))
    assert wrong == []


@pytest.mark.parametrize(
    "shown",
    [
        """config: {"exclude_on": "GPU has fallen off the bus", "ecc": "uncorrectable ECC"}""",
        "sample 7: 'NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.'",
        'prompt: "CUDA error: uncorrectable ECC error encountered"',
        "'Kernel panic - not syncing: Fatal hardware error'",
        "uncorrectable ECC errors: 0",
        "no uncorrectable ECC errors found",
    ],
)
def test_a_quotation_in_a_log_excludes_no_host(shown: str) -> None:
    for last in (("Traceback (most recent call last):", "ValueError: x"), ()):
        found = read_exit(End(exit_code=1, signal=None, lines=(shown, *last))).failure
        assert found is not None
        assert found.scope != "host", (found, last)


def test_a_json_log_is_not_a_quotation() -> None:
    line = """{"level": "error", "msg": "CUDA error: uncorrectable ECC error encountered"}"""
    found = read_exit(End(exit_code=1, signal=None, lines=(line,))).failure
    assert found is not None
    assert found.name == "uncorrectable-ecc"


@pytest.mark.parametrize(
    "flood",
    [
        "nfs: server 10.0.0.1 not responding, still trying",
        "INFO: task python:7 blocked for more than 120 seconds.",
    ],
)
def test_later_messages_of_a_kernel_do_not_hide_the_first_one(flood: str) -> None:
    xid = "[  12.31] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    kernel = [xid, *(f"[ {100 + n}.10] {flood}" for n in range(MOST_LINES + 100))]
    found = read_kernel(list(with_class(kernel)))
    assert found[0].line == xid
    assert len(found) == 2


def test_lines_of_a_broken_encoding_hide_no_line_of_a_kernel() -> None:
    broken = ["\ufffd" * 1_200] * 40
    xid = "[  12.31] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    assert list(with_class([*broken, xid, *broken])) == [xid]
