"""`ndctl classify` gives the end of a log the class that the supervisor gives it."""

import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from orchestrator.app.classification import classify_log, read_end, signal_number
from orchestrator.cli import cli
from orchestrator.contract.spec.failures import FailureRule
from orchestrator.diagnosis.logs.patterns import MOST_BYTES

FALLEN = "[51.0] NVRM: Xid (PCI:0000:1b:00): 79, pid=7, GPU has fallen off the bus."
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.1]:99"
KEYS = {"class", "scope", "action", "excludes_host", "line", "pattern", "advice"}


def run(*args: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(cli, ["classify", *args], input=stdin)


def test_the_end_of_a_log_is_classified_with_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "rank-3.log"
    log.write_text("step 3\nOSError: [Errno 28] No space left on device: '/c'\n")
    said = run(str(log))
    assert said.exit_code == 0
    assert "class    disk-full" in said.output
    assert "line     OSError: [Errno 28] No space left on device: '/c'" in said.output
    assert "pattern  No space left on device|Errno 28" in said.output
    assert "advice   free disk space" in said.output
    body = json.loads(run("-", "--json", stdin=log.read_text()).output)
    assert body.keys() - {"schema_version"} == KEYS
    assert (body["class"], body["excludes_host"]) == ("disk-full", False)


def test_a_kernel_line_that_explains_an_exit_excludes_its_host(tmp_path: Path) -> None:
    log, kernel = tmp_path / "log", tmp_path / "dmesg"
    log.write_text(f"{PEER}\n")
    kernel.write_text(f"{FALLEN}\n")
    alone = json.loads(run(str(log), "--json").output)
    assert (alone["class"], alone["excludes_host"]) == ("gloo-connection", False)
    for args in ((str(log), "--kernel", str(kernel)), ("--kernel", str(kernel))):
        body = json.loads(run(*args, "--json").output)
        assert (body["class"], body["line"], body["excludes_host"]) == ("gpu-lost", FALLEN, True)


def test_early_lines_of_a_kernel_log_are_used_too(tmp_path: Path) -> None:
    kernel = tmp_path / "dmesg"
    later = "".join(f"[{n}.0] audit: type=1400 audit(1): " + "x" * 80 + "\n" for n in range(9000))
    kernel.write_text(f"{FALLEN}\n{later}")
    body = json.loads(run("--kernel", str(kernel), "--json").output)
    assert (body["class"], body["excludes_host"]) == ("gpu-lost", True)
    kernel.write_text(later)
    assert json.loads(run("--kernel", str(kernel), "--json").output)["class"] is None


def test_a_signal_can_be_a_name_a_number_or_an_exit_code() -> None:
    classes = {json.loads(run("--signal", name, "--json").output)["class"] for name in ("SIGKILL",)}
    for name in ("KILL", "kill", "9"):
        classes.add(json.loads(run("--signal", name, "--json").output)["class"])
    for code in ("137", "-9"):
        classes.add(json.loads(run("--exit-code", code, "--json").output)["class"])
    assert classes == {"sigkill-from-outside"}


@pytest.mark.parametrize("name", ["SIGNOPE", "0", "99", ""])
def test_an_unknown_signal_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown signal"):
        signal_number(name)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "Give FILE, --kernel, --exit-code or --signal"),
        (("--signal", "9", "--exit-code", "1"), "Give either --exit-code or --signal"),
        (("--exit-code", "999"), "999 is not in the range -64<=x<=255"),
        (("--exit-code", "-32"), "unknown signal 32: give a name"),
        (("--signal", "SIGNOPE"), "unknown signal SIGNOPE"),
        (("/nowhere/log",), "No such file or directory"),
    ],
)
def test_an_unreadable_input_is_a_usage_error(args: tuple[str, ...], words: str) -> None:
    said = run(*args)
    assert (said.exit_code, words in said.output) == (2, True)


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * (3 * MOST_BYTES) + b"\nRuntimeError: CUDA out of memory. Tried\n")
    with log.open("rb") as file:
        assert len(read_end(file)) <= MOST_BYTES
    assert json.loads(run(str(log), "--json").output)["class"] == "cuda-out-of-memory"


def test_shown_text_has_no_terminal_sequences() -> None:
    hostile = "\x1b]0;owned\x07OSError: [Errno 28] No space left on device: '/c'\x1b[2J\x00"
    for stdin in (hostile, hostile.encode() + b"\xff\xfe"):
        said = run("-", stdin=stdin)
        assert "class    disk-full" in said.output
        assert not set(said.output) & {"\x1b", "\x00", "\x07"}


def test_unknown_facts_are_shown_as_unknown() -> None:
    found = classify_log("all is well\n", exit_code=3)
    assert (found.class_, found.excludes_host, found.line) == ("unknown", False, None)


def test_a_users_class_has_priority() -> None:
    own = FailureRule(name="licence", scope="host", action="replace", patterns=("licence .*gone",))
    found = classify_log("ERROR licence 7 is gone: Connection refused", own=(own,))
    assert (found.class_, found.excludes_host, found.pattern) == ("licence", True, "licence .*gone")


@pytest.mark.parametrize("code", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("before", [0, 3, MOST_BYTES])
def test_a_log_in_utf_16_is_read(code: str, before: int) -> None:
    text = f"\ufeff{'x' * before}\nKeyError: 'labels'\n".encode(code)
    for most in (MOST_BYTES, 63):
        assert read_end(io.BytesIO(text), most).splitlines()[-1] == "KeyError: 'labels'"
