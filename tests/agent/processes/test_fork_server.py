"""The fork server with real, cheap processes: `sh` and `sleep` instead of torchrun and ranks."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from orchestrator.agent.evidence.rank_evidence import last_lines, process_state
from orchestrator.agent.processes import exec_in_fork
from orchestrator.agent.processes.fork_server import Ended, LaunchAnswer, LaunchOrder, Run, Try
from orchestrator.agent.processes.torchrun import render
from orchestrator.agent.rank_socket import free_port
from orchestrator.contract.codec import decode, encode_tagged
from orchestrator.contract.messages.events import RankExited
from orchestrator.posix.locks import is_free
from orchestrator.run_module import command
from tests.agent.watched_host import Host, listening_host
from tests.agent.world import WAIT_S, a_place, a_start, is_gone, kill, wait_for

pytestmark = pytest.mark.process

LAUNCHER = command(sys.executable, "orchestrator.agent.processes.fork_server")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with listening_host(tmp_path) as host:
        yield host


def run(host: Host, *command: str) -> Run:
    log = str(host.folder / "torchrun.log")
    return Run(command=command, environ=host.environ, title="torchrun", log=log)


def attempt(host: Host, *command: str, given: str = "") -> Try:
    return Try(command=command, environ=host.environ, title="check", given=given)


def log_text(host: Host) -> str:
    return (host.folder / "torchrun.log").read_text()


def launcher(host: Host, *modules: str, parent: int | None = None) -> list[str]:
    place = ["--parent", str(parent or os.getpid()), "--lock", str(host.lock)]
    return [*LAUNCHER, *place, "--", *modules]


def order(host: Host, *orders: LaunchOrder, modules: tuple[str, ...] = ()) -> list[Ended]:
    """Send orders to a fork server; returns how each ended."""
    lines = "".join(json.dumps(encode_tagged(one)) + "\n" for one in orders)
    done = subprocess.run(
        launcher(host, *modules),
        input=lines,
        stdout=subprocess.PIPE,
        env=host.environ,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0
    log_text = map(json.loads, done.stdout.splitlines())
    answers: list[LaunchAnswer] = [decode(LaunchAnswer, one) for one in log_text]
    return [answer for answer in answers if isinstance(answer, Ended)]


def ended(code: int, out: str = "", err: str = "") -> Ended:
    return Ended(code=code, out=out, err=err)


@dataclass
class Chain:
    agent: int
    launcher: int
    torchrun: int
    keeper: int
    child: int


@contextmanager
def process_chain(host: Host) -> Iterator[Chain]:
    """agent (sh) -> fork server -> torchrun (sh) -> rank watcher -> child (sleep)."""
    script = f"{shlex.join(host.rank('sleep', '600'))} & wait"
    told = host.folder / "order"
    told.write_text(json.dumps(encode_tagged(run(host, "sh", "-c", script))) + "\n")
    place = ["--lock", str(host.lock)]
    waits = f"{shlex.join([*LAUNCHER, *place])} --parent $$ < {told} & wait"
    agent = subprocess.Popen(["sh", "-c", waits], env=host.environ)
    try:
        child = host.receive_start().pid
        keeper = parent_of(child)
        torchrun = parent_of(keeper)
        yield Chain(agent.pid, parent_of(torchrun), torchrun, keeper, child)
    finally:
        agent.kill()
        agent.wait(WAIT_S)


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("PPid:")[1].split()[0])


@pytest.mark.parametrize("victim", ["agent", "launcher", "torchrun", "keeper", "child"])
def test_all_processes_below_a_killed_one_end_and_the_lock_is_free(host: Host, victim: str) -> None:
    with process_chain(host) as processes:
        assert parent_of(processes.launcher) == processes.agent
        assert not is_free(host.lock)
        kill(getattr(processes, victim))
        for name in ("torchrun", "keeper", "child"):
            pid = getattr(processes, name)
            wait_for(partial(is_gone, pid), f"the end of the {name}")
        wait_for(lambda: is_free(host.lock), "the lock")
        if victim == "child":
            assert host.receive() == RankExited(attempt=4, rank=2, exit_code=None, signal=9)


def ignored(status: str) -> set[int]:
    """Numbers of the ignored signals in a /proc/PID/status."""
    line = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    mask = int(line.split()[1], 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


FROM_A_SCHEDULER = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}


def test_signals_that_a_scheduler_sends_to_all_processes_do_not_end_torchrun(host: Host) -> None:
    order(host, run(host, "cat", "/proc/self/status"))
    assert ignored(log_text(host)) >= FROM_A_SCHEDULER


def test_sigterm_ends_a_rank_below_torchrun(host: Host) -> None:
    # The shell plays torchrun. A child inherits the signals that its parent ignores.
    script = shlex.join(host.rank("cat", "/proc/self/status"))
    order(host, run(host, "sh", "-c", f"NDCTL_TORCHRUN_PID=$$ {script} & wait"))
    found = ignored(host.log.read_text())
    assert found & FROM_A_SCHEDULER == {signal.SIGUSR1, signal.SIGUSR2}


def test_a_module_runs_in_a_process_with_its_imports_done(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still has its own arguments, environment, standard input and exit code."""
    program = "import os, sys\nprint('cmath' in sys.modules, sys.argv[1:], os.environ['RANK'])\n"
    (host.folder / "program.py").write_text(f"{program}print(sys.stdin.read())\nsys.exit(7)\n")
    monkeypatch.setenv("PYTHONPATH", f"{host.folder}:{os.environ.get('PYTHONPATH', '')}")
    asked = run(host, *command(sys.executable, "program"), "--now")
    assert order(host, asked, modules=("cmath",)) == [ended(7)]
    assert log_text(host) == "True ['--now'] 2\n\n"


def test_if_an_import_initialised_a_gpu_driver_the_program_starts_in_a_new_interpreter(
    host: Host, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The driver does not work in a forked process."""
    device = host.folder / "uvm"
    device.touch()
    (host.folder / "touching.py").write_text(
        "from orchestrator.agent.processes import exec_in_fork\n"
        f"exec_in_fork.DRIVERS = ({str(device)!r},)\n"
        f"held = open({str(device)!r})\n"
    )
    (host.folder / "program.py").write_text("import sys\nprint('cmath' in sys.modules)\n")
    monkeypatch.setenv("PYTHONPATH", f"{host.folder}:{os.environ.get('PYTHONPATH', '')}")
    asked = run(host, *command(sys.executable, "program"))
    assert order(host, asked, modules=("cmath",)) == [ended(0)]
    capfd.readouterr()
    assert order(host, asked, asked, modules=("cmath", "touching")) == [ended(0)] * 2
    assert log_text(host) == "True\nFalse\nFalse\n"
    told = capfd.readouterr().err
    assert told.count(f"a package initialised a GPU driver ({device})") == 1


def test_nvml_does_not_count_as_an_initialised_driver() -> None:
    """On an H200, each restart imported for 11 s, because NVML had opened /dev/nvidiactl."""
    assert "/dev/nvidiactl" not in exec_in_fork.DRIVERS
    assert "/dev/nvidia-uvm" in exec_in_fork.DRIVERS


def test_output_of_an_import_is_not_taken_for_an_answer(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host.folder / "banner.py").write_text(
        "import os\nprint('Welcome!')\nos.write(1, b'from C as well\\n')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{host.folder}:{os.environ.get('PYTHONPATH', '')}")
    assert order(host, run(host, "true"), modules=("banner",)) == [ended(0)]
    assert log_text(host) == ""


def test_files_that_an_import_opened_stay_open_but_pipes_do_not(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch, for example, opens TORCH_LOGS_OUT once and keeps it open."""
    log = host.folder / "library.log"
    (host.folder / "library.py").write_text(
        f"import os\nlog = open({str(log)!r}, 'w')\nread, write = os.pipe()\n"
    )
    (host.folder / "program.py").write_text(
        "import os, library\nlibrary.log.write('still here')\nlibrary.log.flush()\n"
        "print(*(os.readlink(f'/proc/self/fd/{fd}') for fd in (library.read, library.write)))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{host.folder}:{os.environ.get('PYTHONPATH', '')}")
    asked = run(host, *command(sys.executable, "program"))
    assert order(host, asked, modules=("library",)) == [ended(0)]
    assert log_text(host) == "/dev/null /dev/null\n"
    assert log.read_text() == "still here"


PROGRAM = """
import ctypes, faulthandler, os, signal, sys, threading
handled = [n for n in signal.valid_signals() if callable(signal.getsignal(n))]
pipes = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")[:-1]]
print("torch" in sys.modules, handled, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(threading.active_count(), faulthandler.is_enabled(), sys.argv[1:], __name__)
print(os.environ["RANK"], sum(name[0] != "/" for name in pipes), flush=True)
os.write(2, b"terminate called after throwing an instance of 'c10::Error'\\n")
os.abort()
"""


def test_a_rank_forked_by_the_real_torchrun_looks_like_a_new_process(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host.folder / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{host.folder}:{os.environ.get('PYTHONPATH', '')}")
    imports = ("torch.distributed.launcher.api",)
    place = replace(a_place(host.folder), python=sys.executable, imports=imports)
    start = a_start(place, "")
    *torchrun, _, _, _, _, _ = render(replace(start, master_port=free_port("127.0.0.1")), place)
    program = (*torchrun, *command(sys.executable, "program"), "--now")
    assert order(host, run(host, *program), modules=place.imports)[0].code == 1
    log = place.run_dir.attempt_logs(1, place.host) / "rank-0.log"
    assert last_lines(log) == (
        "True [<Signals.SIGINT: 2>] set()",
        "1 False ['--now'] __main__",
        "0 0",
        "terminate called after throwing an instance of 'c10::Error'",
    )


def test_an_exception_of_a_module_is_in_the_log(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host.folder / "program.py").write_text("raise ValueError('no port')\n")
    monkeypatch.setenv("PYTHONPATH", f"{host.folder}:{os.environ.get('PYTHONPATH', '')}")
    assert order(host, run(host, *command(sys.executable, "program"))) == [ended(1)]
    assert log_text(host).endswith("ValueError: no port\n")


def test_after_a_failed_import_the_program_starts_in_a_new_interpreter(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second import of torch in the same process fails with a different, misleading error."""
    (host.folder / "library.py").write_text("raise OSError('libcuda.so.1: no such file')\n")
    (host.folder / "program.py").write_text(
        "import sys\nprint('cmath' in sys.modules, flush=True)\nimport library\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{host.folder}:{os.environ.get('PYTHONPATH', '')}")
    program = command(sys.executable, "program")
    asked = (attempt(host, *program), run(host, *program))
    tried, ran = order(host, *asked, modules=("cmath", "library"))
    assert (tried.code, tried.out) == (1, "True\n"), "the first module was imported once"
    assert tried.err.endswith("OSError: libcuda.so.1: no such file\n")
    assert ran.code == 1
    assert log_text(host).startswith("False\n")
    assert log_text(host).endswith("OSError: libcuda.so.1: no such file\n")


def test_a_program_that_does_not_exist_exits_with_127(host: Host) -> None:
    assert order(host, run(host, "no-such-program-here")) == [ended(127)]
    assert "failed to start no-such-program-here" in log_text(host)


def test_orders_are_answered_one_after_the_other(host: Host) -> None:
    script = "cat; echo badly >&2; exit $RANK"
    orders = (
        attempt(host, "sh", "-c", script, given="x" * 200_000),
        attempt(host, "sh", "-c", "kill -9 $$"),
        run(host, "sh", "-c", "echo at last; exit 5"),
        run(host, "sh", "-c", "echo and again"),
    )
    assert order(host, *orders) == [
        ended(2, "x" * 200_000, "badly\n"),
        ended(-9),
        ended(5),
        ended(0),
    ]
    assert log_text(host) == "at last\nand again\n"


def test_a_log_that_cannot_be_written_is_reported(host: Host) -> None:
    (host.folder / "torchrun.log").mkdir()
    first, second = order(host, run(host, "true"), attempt(host, "true"))
    assert (first.code, second.code) == (1, 0)
    assert "Is a directory" in first.err


def test_a_waiting_fork_server_holds_no_lock_but_a_try_does(host: Host) -> None:
    agent = subprocess.Popen(
        launcher(host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=host.environ, text=True
    )
    assert agent.stdin is not None
    assert agent.stdout is not None
    locked, quick = attempt(host, "sleep", "600"), attempt(host, "true")
    for one in (quick, locked):
        assert is_free(host.lock)
        agent.stdin.write(json.dumps(encode_tagged(one)) + "\n")
        agent.stdin.flush()
        if one is quick:
            agent.stdout.readline()
            assert decode(LaunchAnswer, json.loads(agent.stdout.readline())) == ended(0)
    wait_for(lambda: not is_free(host.lock), "the second try")
    kill(agent.pid)
    agent.communicate(timeout=WAIT_S)
    wait_for(lambda: is_free(host.lock), "the end of the try")


def test_processes_left_by_a_program_are_reaped_before_the_next_order(host: Host) -> None:
    """In a pod there is no init process that would reap them."""
    process = subprocess.Popen(
        launcher(host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=host.environ, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    told, answers = process.stdin, process.stdout

    def tell(order: LaunchOrder) -> LaunchAnswer:
        told.write(json.dumps(encode_tagged(order)) + "\n")
        told.flush()
        answers.readline()  # the answer that the program started
        answer: LaunchAnswer = decode(LaunchAnswer, json.loads(answers.readline()))
        return answer

    log_text = tell(attempt(host, "sh", "-c", "sleep 600 >&2 & echo $!"))
    assert isinstance(log_text, Ended)
    left = int(log_text.out)
    assert parent_of(left) == process.pid
    kill(left)
    wait_for(lambda: process_state(left) == "Z", "its end")
    assert tell(attempt(host, "true")) == ended(0)
    assert process_state(left) == "gone"
    process.communicate(timeout=WAIT_S)


def test_a_fork_server_ends_with_its_parent_or_its_input(host: Host) -> None:
    mark = host.folder / "mark"
    line = json.dumps(encode_tagged(run(host, "touch", str(mark)))) + "\n"
    orphan = launcher(host, parent=1)
    done = subprocess.run(
        orphan, input=line, env=host.environ, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 137
    assert not mark.exists()
    assert order(host) == []
