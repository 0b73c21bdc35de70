"""An error that no rule knows gets the class of the package that raised it."""

import pytest

from orchestrator.app.classification import classify_log
from orchestrator.diagnosis.logs.patterns import Text
from orchestrator.diagnosis.logs.raised_in import with_packages


def raised(path: str, error: str) -> str:
    return f"""Traceback (most recent call last):
  File "/opt/job/train.py", line 8, in <module>
    main()
  File "{path}", line 77, in inner
    raise it
{error}"""


def test_the_innermost_frame_of_a_package_becomes_a_line_about_it() -> None:
    text = with_packages(
        Text.of(raised("/opt/v/lib/python3.11/site-packages/PIL/a.py", "OSError: odd").splitlines())
    )
    said = [text.line(number).decode() for number in range(len(text.lines))]
    assert "  raised in PIL/a.py: OSError: odd" in said
    assert any("/opt/job/train.py" in line for line in said)


def test_a_frame_of_the_program_itself_stays() -> None:
    lines = raised("/opt/job/model.py", "OSError: odd").splitlines()
    assert with_packages(Text.of(lines)).lines == tuple(lines)


@pytest.mark.parametrize(
    ("path", "error", "expected"),
    [
        ("/opt/v/lib/python3.11/site-packages/triton/x.py", "RuntimeError: odd", "compile-failure"),
        ("/opt/v/lib/python3.11/site-packages/PIL/Image.py", "OSError: odd", "data-error"),
        ("/opt/v/lib/python3.11/site-packages/h5py/_hl/files.py", "OSError: odd", "data-error"),
        ("/opt/job/mine.py", "RuntimeError: odd", "python-exception"),
    ],
)
def test_an_unknown_error_has_the_class_of_its_package(
    path: str, error: str, expected: str
) -> None:
    assert classify_log(raised(path, error), exit_code=1).class_ == expected


def test_a_matching_rule_has_priority_over_the_package() -> None:
    path = "/opt/v/lib/python3.11/site-packages/PIL/Image.py"
    found = classify_log(raised(path, "OSError: [Errno 28] No space left on device"), exit_code=1)
    assert found.class_ == "disk-full"


def test_a_socket_that_times_out_is_no_file_system() -> None:
    timeout = "TimeoutError: [Errno 110] Connection timed out"
    path = "/usr/lib/python3.11/socket.py"
    found = classify_log(raised(path, timeout), exit_code=1)
    assert found.class_ == "service-unreachable"
    # A read of a file that is open already names no path.
    found = classify_log(raised("/opt/job/data.py", timeout), exit_code=1)
    assert found.class_ == "storage-error"
    found = classify_log(raised(path, f"{timeout}: '/mnt/data/x'"), exit_code=1)
    assert found.class_ == "storage-error"


def test_an_error_during_import_has_the_class_environment() -> None:
    path = "/opt/v/lib/python3.11/site-packages/odd/setup.py"
    error = raised(path, "RuntimeError: odd").replace("in inner", "in <module>")
    assert classify_log(error, exit_code=1).class_ == "import-or-version"
    own = raised("/opt/job/mine.py", "RuntimeError: odd").replace("in inner", "in <module>")
    assert classify_log(own, exit_code=1).class_ == "python-exception"


@pytest.mark.parametrize("above", ["", '  File "<frozen runpy>", line 88, in _run_code\n'])
def test_a_program_inside_a_package_is_not_an_import(above: str) -> None:
    log = f"""Traceback (most recent call last):
{above}  File "/opt/v/lib/python3.11/site-packages/swift/cli/sft.py", line 20, in <module>
    sft_main()
RuntimeError: odd"""
    assert classify_log(log, exit_code=1).class_ == "python-exception"
