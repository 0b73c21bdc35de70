"""The lines of a log that say why its rank ended."""

import pytest

from orchestrator.app.classification import Classification, classify_log


def found(log: str, exit_code: int | None = 1, signal: str | None = None) -> Classification:
    return classify_log(log, exit_code=exit_code if signal is None else None, signal=signal)


TRACEBACK = """Traceback (most recent call last):
  File "/opt/job/train.py", line 8, in <module>
    main()
"""
FULL = "OSError: [Errno 28] No space left on device"
RAISED = f"{TRACEBACK}{FULL}"


@pytest.mark.parametrize(
    "prefix",
    [
        "worker-3: ",
        "[1,0]<stderr>:",
        "2026-03-01T10:00:00.123456 n12 trainer[811]: ",
        "{node=7} | ",
        "(Worker pid=811, ip=10.0.0.7) ",
    ],
)
def test_a_prefix_that_every_line_has_is_learned_from_the_traceback(prefix: str) -> None:
    log = "\n".join(f"{prefix}{line}" for line in RAISED.splitlines())
    assert found(f"{prefix}step 1\n{log}").class_ == "disk-full"


def test_numbers_in_a_learned_prefix_differ_from_line_to_line() -> None:
    lines = RAISED.splitlines()
    log = "\n".join(f"<{7 + number}> t{number}| {line}" for number, line in enumerate(lines))
    assert found(log).class_ == "disk-full"


@pytest.mark.parametrize(
    "words",
    [
        "ValueError: bad shape. It is possible that no space is left on device",
        "RuntimeError: save failed. Possible reasons: No space left on device, quota",
        "RuntimeError: it stopped; please check that there is space: No space left on device",
    ],
)
def test_suggestions_in_an_exception_are_ignored(words: str) -> None:
    assert found(f"{TRACEBACK}{words}").class_ != "disk-full"


def test_a_statement_before_a_suggestion_is_used() -> None:
    stated = "RuntimeError: No space left on device; please check your quota"
    assert found(f"{TRACEBACK}{stated}").class_ == "disk-full"


@pytest.mark.parametrize(
    "last",
    [
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "RuntimeError: one of the background workers are no longer alive",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated",
    ],
)
def test_an_exception_that_refers_to_an_earlier_one_has_its_class(last: str) -> None:
    log = f"ERROR in worker 1: {FULL}\n{TRACEBACK}{last}"
    assert found(log).class_ == "disk-full"


def test_an_independent_exception_does_not_refer_to_an_earlier_one() -> None:
    log = f"ERROR in worker 1, tried again: {FULL}\n{TRACEBACK}KeyError: 'labels'"
    assert found(log).class_ == "python-exception"


@pytest.mark.parametrize(
    "after",
    [
        "node3:11:12 [3] NCCL WARN Connection closed by remote peer node5<43210>",
        "[rank1]:[E1201 10:00:00.1 TCPStore.cpp:125] recvValue failed: Connection reset by peer",
        "[E socket.cpp:957] [c10d] The client socket has timed out after 60s",
        "node3:11:12 [3] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<1> with error 12",
        "wandb: ERROR Error while calling W&B API: context deadline exceeded (<Response [500]>)",
    ],
)
def test_a_connection_that_a_library_loses_after_an_exception_is_not_its_cause(after: str) -> None:
    wrong = "ValueError: Expected input batch_size (8) to match target batch_size (4)."
    assert found(f"{TRACEBACK}{wrong}\n{after}").class_ == "python-exception"
    # The same line explains an exception about a connection, and one that only refers to it.
    lost = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:6"
    assert found(f"{TRACEBACK}{lost}\n{after}").class_ == "gloo-connection"
    refers = "RuntimeError: process group failed, see the messages in the log"
    assert found(f"{TRACEBACK}{refers}\n{after}").class_ != "python-exception"


@pytest.mark.parametrize(
    ("before", "between"),
    [("2026-03-01 10:00:00 ERROR the upload failed\n", ""), ("", "step 41  loss 3.218\n")],
)
def test_an_exception_that_a_rank_survived_does_not_hide_the_loss_of_a_peer(
    before: str, between: str
) -> None:
    lost = "node3:11:12 [3] NCCL WARN Connection closed by remote peer node5<43210>"
    log = f"{before}{TRACEBACK}ValueError: odd\n{between}{lost}"
    assert found(log).class_ == "nccl-remote-error"


def test_a_service_that_an_exception_names_is_its_cause() -> None:
    lost = "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api', port=443): x"
    log = f"{TRACEBACK}{lost}\nwandb: ERROR context deadline exceeded"
    assert found(log).class_ == "service-unreachable"


def test_broken_hardware_that_nccl_reports_after_an_exception_is_the_cause() -> None:
    ecc = "node3:11:12 [3] NCCL WARN Cuda failure 'uncorrectable ECC error encountered'"
    assert found(f"{TRACEBACK}RuntimeError: odd\n{ecc}").class_ == "uncorrectable-ecc"


def test_errors_during_cleanup_are_not_the_cause() -> None:
    cleanup = """Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/util.py", line 303, in _run_finalizers
    finalizer()
OSError: [Errno 39] Directory not empty: 'pymp-x1'
"""
    assert found(f"{RAISED}\n{cleanup}").class_ == "disk-full"


def test_the_traceback_of_a_worker_inside_another_traceback_is_used() -> None:
    log = f"""{TRACEBACK}RuntimeError: Caught RuntimeError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/opt/job/data.py", line 3, in __getitem__
    return torch.load(path)
RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory
"""
    assert found(log).class_ == "torn-checkpoint"


def test_a_crash_names_the_limit_that_was_exceeded() -> None:
    log = (
        "step 1\nOpenBLAS blas_thread_init: pthread_create failed: Resource temporarily unavailable"
    )
    assert found(log, signal="SIGSEGV").class_ == "process-limit"
    outlived = f"{log}\nstep 2\nstep 3\n"
    assert found(outlived, signal="SIGSEGV").class_ == "segfault"


def test_messages_of_a_library_before_its_abort_are_used() -> None:
    log = "step 1\nwriting of the index failed: no space left on device"
    assert found(f"{log}\nFatal Python error: Aborted", signal="SIGABRT").class_ == "disk-full"
    assert found("step 1\nFatal Python error: Aborted", signal="SIGABRT").class_ == "abort"


def test_a_kernel_that_waited_for_a_peer_made_no_wrong_access() -> None:
    log = """terminate called after throwing an instance of 'EPException'
  what():  Failed: CUDA error deep_ep.cpp:83 'unspecified launch failure'
"""
    waited = "DeepEP dispatch NVL receiver timeout, channel: 6, RDMA: 0, nvl: 0, src NVL: 5"
    assert found(f"{waited}\n{log}", signal="SIGABRT").class_ == "infiniband-error"
    assert found(log, signal="SIGABRT").class_ == "illegal-memory-access"


def test_nccls_last_error_is_read_as_its_warning() -> None:
    log = f"""{TRACEBACK}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, \
unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3
ncclSystemError: System call (e.g. socket, malloc) or external library call failed.
Last error:
Call to ibv_create_qp failed with error Cannot allocate memory
"""
    assert found(log).class_ == "locked-memory-limit"


def test_nccls_warning_before_an_abort_explains_it() -> None:
    log = """n3:1:9 [5] net_ib.cc:1295 NCCL WARN NET/IB : Got completion with error 12, opcode 0
[rank3]:[E629 04:12:20.1 ProcessGroupNCCL.cpp:1414] [Rank 3] watchdog thread terminated with \
exception: NCCL error: remote process exited or there was a network error, NCCL version 2.18.1
"""
    assert found(log, signal="SIGABRT").class_ == "infiniband-error"


def test_the_last_warning_of_torch_is_used_if_there_is_nothing_else() -> None:
    warned = (
        "[rank1]:[W729 10:15:17.5 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=76): "
        "Connection reset by peer"
    )
    assert found(warned).class_ in ("rendezvous-failure", "peer-unreachable", "gloo-connection")
    assert found(f"{warned}\nstep 1").class_ == "unknown"


def test_a_kubernetes_event_is_not_ignored_as_an_old_warning() -> None:
    event = '  Warning  Failed  3s  kubelet  Failed to pull image "r/t:1": not found'
    assert found(f"Events:\n{event}").class_ == "image-pull-failed"


def test_a_message_about_a_scheduler_limit_fits_sigterm() -> None:
    log = "step 4\nTERM_MEMLIMIT: job killed after reaching LSF memory usage limit."
    assert found(log, signal="SIGTERM").class_ == "host-out-of-memory"
