"""`${VAR}` and `${VAR:-default}` in the values of a spec, and `$${` for a `${` that stays.

A value with variables is read like the YAML that it then is, so `hosts: "${HOSTS:-2}"` is a number.
Text that another program reads keeps its `${…}`: lines for a shell, regular expressions, and
templates of Kubernetes.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.contract.codec import Problem, join
from orchestrator.yaml_document import Document, scalar_of

SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh", "fish"})
OF_OTHERS = re.compile(
    r"cluster\.slurm\.(setup\[|hooks\.)|cluster\.kubernetes\.pod_template\."
    r"|notify\[\d+\]\.command\[|resilience\.failure_classes\[\d+\]\.(patterns|unless)\["
    r"|run\.metrics\."
)
"""Paths of text that another program reads."""
VARIABLE = re.compile(
    r"\$(?P<kept>\$\{)"
    # The default may have braces, such as `{stdlib}`.
    r"|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(:-(?P<default>([^{}]|\{[^{}]*\})*))?\}"
)
OTHER_FORM = re.compile(r"(?<!\$)\$\{[A-Za-z_][A-Za-z0-9_]*(-|:?[?+=]).*?\}")
"""Forms of a shell that ndctl does not know."""


def expand(document: Document, environ: Mapping[str, str] | None) -> None:
    """Replace the variables in the values of `document`, except those that `--set` changes.

    Args:
        environ: None for a spec that ndctl wrote, which has no variables: only `$${` is replaced.
    """
    for path, container, key, text in [*_texts(document.data)]:
        if document.is_overridden(path):
            continue
        if environ is None:
            container[key] = text.replace("$${", "${")
        elif (expanded := _expanded(document, path, text, environ)) is not None:
            container[key] = scalar_of(expanded)
            # If the key takes text, such as a name of digits, it gets the text after all.
            document.texts[path] = (container, key, expanded)


def _expanded(document: Document, path: str, text: str, environ: Mapping[str, str]) -> str | None:
    """`text` with its variables replaced. None: it has none, or a problem was reported."""
    problems = len(document.problems)
    unset: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match["kept"]:
            return "${"
        given = environ.get(match["name"])
        if match["default"] is not None:
            return given or match["default"]
        if given is None:
            unset.append(match["name"])
        return given or ""

    if other := OTHER_FORM.search(text):
        limit = "written with ${VAR} or ${VAR:-default}, the only forms of variables"
        fix = f"write $${other[0][1:]} if {other[0]} is meant for another program"
        document.report(Problem(path=path, value=text, limit=limit, fix=fix))
    expanded = VARIABLE.sub(value, text)
    for name in dict.fromkeys(unset):
        limit = f"a value whose variables are set; {name} is not"
        fix = (
            f"set {name}, or write ${{{name}:-default}}; $${{{name}}} keeps the text for another"
            " program"
        )
        document.report(Problem(path=path, value=text, limit=limit, fix=fix))
    return None if len(document.problems) > problems or expanded == text else expanded


def _texts(data: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Path, container, key and text of each value with `${` that ndctl itself reads."""
    run = data.get("run") if isinstance(data, dict) else None
    program = run.get("program") if isinstance(run, dict) else None
    for path, container, key, text in _values("", data):
        in_a_shell = path.startswith("run.args[") and Path(str(program)).name in SHELLS
        if "${" in text and not in_a_shell and not OF_OTHERS.match(path):
            yield path, container, key, text


def _values(path: str, data: Any) -> Iterator[tuple[str, Any, Any, str]]:
    if isinstance(data, dict):
        inside = [(join(path, key), key) for key in data]
    elif isinstance(data, list):
        inside = [(f"{path}[{at}]", at) for at in range(len(data))]
    else:
        return
    for where, key in inside:
        if isinstance(data[key], str):
            yield where, data, key, data[key]
        else:
            yield from _values(where, data[key])


def escape(data: Any) -> None:
    """Write the texts of a spec so that reading them again changes nothing."""
    for _, container, key, text in [*_texts(data)]:
        container[key] = text.replace("${", "$${")
