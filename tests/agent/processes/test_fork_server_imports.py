"""A real fork server that learned modules: harmless ones are in its forks, harmful ones are not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from orchestrator.agent.processes.fork_server import Ended, LaunchAnswer, Run
from orchestrator.agent.processes.fork_server_imports import MOST_HARMFUL, Imports, learned_in
from orchestrator.contract.codec import decode, encode_tagged
from orchestrator.run_module import command
from tests.agent.watched_host import Host, listening_host
from tests.agent.world import WAIT_S, is_gone, wait_for

pytestmark = pytest.mark.process

HARMFUL = {
    "threads": (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    ),
    "fails": "raise RuntimeError('no licence\\nhere')\n",
    "dies": "import os\nos._exit(3)\n",
    "leaves": "raise SystemExit(0)\n",
    "driver": (
        "from orchestrator.agent.processes import exec_in_fork\n"
        "exec_in_fork.DRIVERS = (__file__,)\nheld = open(__file__)\n"
    ),
}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with listening_host(tmp_path) as host:
        yield host


class ForkServer:
    """One that learned `modules`, whose sources are below `host.folder`."""

    def __init__(self, host: Host, sources: Mapping[str, str], learned: list[str]) -> None:
        self.host = host
        # Two threads: OpenBLAS starts one when numpy is imported, which is harmless.
        own = {"PYTHONPATH": str(host.folder), "OMP_NUM_THREADS": "2"}
        self.environ = {**host.environ, **own}
        for name, source in sources.items():
            (host.folder / f"{name}.py").write_text(source)
        (host.folder / "program.py").write_text(
            "import os, sys\nmine = sys.argv[1].split(',')\n"
            "print(*(name for name in mine if name in sys.modules))\n"
        )
        file, self.log = host.folder / "imports.json", host.folder / "agent.log"
        file.write_text(json.dumps(learned))
        place = ["--parent", str(os.getpid()), "--lock", str(host.lock), "--learned", str(file)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command(sys.executable, "orchestrator.agent.processes.fork_server"), *place],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environ,
                text=True,
            )

    def imported(self, *modules: str) -> list[str]:
        """Those of `modules` that a program has when it starts."""
        return self.run("program", ",".join(modules)).split()

    def run(self, module: str, *args: str) -> str:
        """The output of a module as a program."""
        log = self.host.folder / "torchrun.log"
        log.unlink(missing_ok=True)
        program = (*command(sys.executable, module), *args)
        order = Run(command=program, environ=self.environ, title="torchrun", log=str(log))
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(encode_tagged(order)) + "\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        answer: LaunchAnswer = decode(LaunchAnswer, json.loads(self.process.stdout.readline()))
        assert isinstance(answer, Ended)
        assert answer.code == 0, log.read_text()
        return log.read_text()

    def wait_for_word(self, word: str) -> None:
        wait_for(lambda: word in self.log.read_text(), f"{word!r} in {self.log.read_text()!r}")

    def close(self) -> None:
        self.process.communicate(timeout=WAIT_S)


@pytest.mark.parametrize("kind", HARMFUL)
def test_a_harmful_module_is_left_to_the_ranks_and_the_others_are_imported(
    host: Host, kind: str
) -> None:
    sources = {"before": "", kind: HARMFUL[kind], "after": "print('ready', flush=True)\n"}
    server = ForkServer(host, sources, ["before", kind, "after"])
    server.wait_for_word("ready")
    assert server.imported("before", kind, "after") == ["before", "after"]
    # A second attempt from the same fork server gets the same.
    assert server.imported("before", kind, "after") == ["before", "after"]
    server.close()
    told = server.log.read_text()
    assert told.count(f"so each rank imports {kind} itself") == 1
    assert told.count("ready") == 1, "a module prints at its trial too"
    words = {
        "threads": "threads starts 1 thread when",
        "fails": "fails raises RuntimeError: no licence here when it is imported",
        "dies": "dies ends the process when",
        "leaves": "leaves raises SystemExit: 0 when",
        "driver": "driver initialises a GPU driver",
    }
    assert words[kind] in told


def test_pyarrow_is_imported_once_though_its_memory_allocator_has_a_thread(host: Host) -> None:
    """A fork without that thread can still use all that pyarrow offers."""
    uses = (
        "import pyarrow, pyarrow.compute\n"
        "table = pyarrow.table({'a': range(1_000_000)})\n"
        "print(pyarrow.compute.sum(table['a']).as_py())\n"
    )
    (host.folder / "uses.py").write_text(uses)
    server = ForkServer(host, {"after": "print('ready', flush=True)\n"}, ["pyarrow", "after"])
    server.wait_for_word("ready")
    assert server.imported("pyarrow", "after") == ["pyarrow", "after"]
    assert server.run("uses").strip() == str(sum(range(1_000_000)))
    server.close()
    assert "pyarrow" not in server.log.read_text()


def test_an_order_does_not_wait_for_a_module_that_hangs(host: Host) -> None:
    """What was harmless by then is imported. The hanging trial is gone, with what it started."""
    sleeps = (
        "import os, pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path(__file__).with_name('pids').write_text(f'{os.getpid()} {child.pid}')\n"
        "time.sleep(600)\n"
    )
    quick = {"quick": "print('ready', flush=True)\n"}
    server = ForkServer(host, {**quick, "hangs": sleeps}, ["quick", "hangs"])
    server.wait_for_word("ready")
    pids = host.folder / "pids"
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2, "the trial")
    # The program lists its modules and ends, while the trial would go on for 600 s.
    assert server.imported("quick", "hangs") == ["quick"]
    for pid in map(int, pids.read_text().split()):
        wait_for(partial(is_gone, pid), f"the end of {pid}")
    server.close()


def test_other_modules_of_a_harmful_package_are_not_tried(host: Host) -> None:
    package = host.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text(HARMFUL["threads"])
    (package / "part.py").touch()
    learned = ["package.part", "package", "after"]
    server = ForkServer(host, {"after": "print('ready', flush=True)\n"}, learned)
    server.wait_for_word("ready")
    assert server.imported(*learned) == ["after"]
    server.close()
    assert server.log.read_text().count("package itself") == 1


def test_after_many_harmful_packages_no_more_are_tried(host: Host) -> None:
    names = [f"bad{number}" for number in range(MOST_HARMFUL + 2)]
    server = ForkServer(host, dict.fromkeys(names, HARMFUL["fails"]), names)
    server.wait_for_word(f"{names[MOST_HARMFUL]} itself")
    assert server.imported(*names) == []
    server.close()
    assert names[-1] not in server.log.read_text()


def test_no_trial_is_left_behind_when_its_fork_server_ends(host: Host) -> None:
    waits = (
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_name('pids').write_text(f'{os.getpid()} .')\n"
        "time.sleep(600)\n"
    )
    server = ForkServer(host, {"waits": waits}, ["waits"])
    pids = host.folder / "pids"
    wait_for(lambda: pids.exists() and pids.read_text().endswith("."), "the trial")
    server.process.kill()
    server.close()
    wait_for(partial(is_gone, int(pids.read_text().split()[0])), "the end of the trial")


@pytest.mark.parametrize("text", [None, "", "{", '"transformers"', '{"a": 1}', "[1, null]"])
def test_a_bad_list_of_learned_modules_is_an_empty_one(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "imports.json"
    if text is not None:
        file.write_text(text)
    assert learned_in(file) == []


def test_without_learned_modules_nothing_is_tried() -> None:
    imports = Imports(["cmath"])
    assert imports.left
    imports.next()
    assert (imports.left, imports.pipes, imports.failed) == (False, [], False)
