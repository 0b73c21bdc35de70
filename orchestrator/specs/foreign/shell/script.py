"""Reads a script of a shell for what a job needs: its program, variables and folder.

It follows the script from top to bottom without running it. A branch whose condition only a shell
knows is not entered.
"""

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import pairwise, takewhile
from pathlib import PurePath

from msgspec import Struct, field
from msgspec.structs import replace

from orchestrator.specs.foreign.carried import OF_NDCTL
from orchestrator.specs.foreign.command_lines import (
    COMMANDS,
    RUNTIMES,
    SHELLS,
    is_launcher,
    launched,
    program_of,
)
from orchestrator.specs.foreign.shell.branches import Branches
from orchestrator.specs.foreign.shell.words import (
    LITERAL,
    MARKS,
    MOST_PARTS,
    NAME,
    Command,
    Values,
    commands_in,
    expanded,
    for_inner_shell,
    joined,
    patterns,
    redirected,
    without_documents,
)

MOST_DEPTH = 4
"""Scripts inside `bash -c` of scripts."""
QUIET = frozenset(
    (
        *("echo", "set", "printf", "true", ":", "date", "hostname", "sleep", "wait", "exit"),
        *("clear", "shift", "local", "nvidia-smi", "rocm-smi", "cd"),
        *("pushd", "popd", "export", "declare", "typeset", "readonly", "exec"),
        *("return", "break", "continue", "ifconfig", "tee", "head", "tail", "awk", "grep"),
        *("cut", "tr", "sort", "wc", "cat", "alias"),
    )
)
"""Commands that the job does not need, or that are read on their own."""
PREPARES = ("module", "ml", "source", ".", "conda", "micromamba", "mamba")
OPEN = frozenset(("for", "while", "until", "do", "done", "{", "}", "time", "exec"))
"""Words of a shell before a command."""
ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)


class Start(Struct, frozen=True):
    """A command line that starts a program on the job's hosts."""

    line: int
    words: tuple[str, ...]
    text: str
    before: tuple[str, ...] = ()
    """Lines before it in the same `bash -c`, if that runs in a container."""
    patterns: tuple[str, ...] = ()
    """Words that a shell replaces with names of files."""
    loop: str | None = None
    """The loop around it, such as `until srun torchrun train.py`."""
    reads: str | None = None
    """What it has as its standard input, such as `< answers.txt`."""
    folder: str | None = None
    exported: Mapping[str, str] = {}
    """The folder and the variables in which it starts. Lines behind it may change them."""

    @property
    def rank(self) -> int:
        """How much it looks like the training: a server or a preparation has srun alone, or no
        launcher at all, and the training has torchrun behind srun."""
        return sum(map(is_launcher, self.words))


class Shell(Struct, kw_only=True):
    """What a script says."""

    values: Values = field(default_factory=dict)
    exported: dict[str, str] = field(default_factory=dict)
    folder: str | None = None
    at_start: str = "${PWD}"
    """The folder in which the script starts."""
    folders: list[str | None] = field(default_factory=list)
    """The folders that `cd` and `pushd` left."""
    setup: list[str] = field(default_factory=list)
    """Lines that prepare the environment, such as `module load` and `conda activate`, in the order
    of the script."""
    functions: dict[str, str] = field(default_factory=dict)
    exports_all: bool = False
    """Whether `set -a` exports each variable that is set."""
    shifted: int = 0
    """Arguments of the script that `shift` removed so far."""
    calls: int = 0
    """Calls of functions so far."""
    loops: dict[str, str] = field(default_factory=dict)
    """The variables of `for` loops, and the words that they go through."""
    open_loops: list[str] = field(default_factory=list)
    """The loops around the line that is read, from the outer one to the inner one."""
    starts: list[Start] = field(default_factory=list)
    subshells: list[tuple[str | None, Values, dict[str, str]]] = field(default_factory=list)
    """Folder and variables of the shell around each subshell that is open."""
    all_subshells: int = 0
    maybe: list[Command] = field(default_factory=list)
    """Commands of branches that were not entered, as only a shell knows their condition."""
    others: list[tuple[int, str]] = field(default_factory=list)
    """Lines and commands that do something else."""
    written: list[tuple[int, str, str]] = field(default_factory=list)
    """Lines such as `echo TEXT > FILE`, with the file."""

    def training(self) -> Start | None:
        """The last start of those that look most like a training."""
        best = max((one.rank for one in self.starts), default=0)
        return next((one for one in reversed(self.starts) if one.rank == best), None)


def read_shell(text: str, values: Values, literal: str = "$${") -> Shell:
    """What the script `text` says.

    Args:
        values: variables that are known before.
        literal: what stands for a `${` that begins no variable, in words, folder and variables.
    """
    shell = Shell(values=values, at_start=joined("$PWD", values))
    _read(shell, text, 0, None)
    if (training := shell.training()) is not None:
        shell.folder, shell.exported = training.folder, {**training.exported}
    shell.setup = [one.replace(LITERAL, "${") for one in shell.setup]
    shell.exported = {
        name: value.replace(LITERAL, literal) for name, value in shell.exported.items()
    }
    shell.starts = [
        replace(one, words=tuple(word.replace(LITERAL, literal) for word in one.words))
        for one in shell.starts
    ]
    if shell.folder is not None:
        shell.folder = shell.folder.replace(LITERAL, literal)
    return shell


def _read(shell: Shell, text: str, depth: int, at_line: int | None) -> None:
    branches = Branches(shell.values)
    files: list[tuple[int, str]] = []
    text = without_documents(_without_functions(text, shell.functions), files)
    shell.others += files
    for command in commands_in(text):
        words = list(command.words)
        if not branches.reads_patterns():
            _subshells(shell, command)
        if words[0] in ("if", "elif") and branches.runs_condition(words[0]):
            tested = words[2:] if words[1:2] == ["!"] else words[1:]
            if _launches(tested) and program_of(tested) is not None:
                _command(shell, replace(command, words=tuple(tested)), depth)
        if (inner := branches.commands(words, command.after)) is None:
            continue
        while inner and inner[0] in OPEN:
            inner = _behind_word(shell, inner)
        line = command.line if at_line is None else at_line
        one = Command(line, tuple(inner), command.after)
        if inner and branches.run():
            _command(shell, one, depth)
        elif inner:
            _ask_for_argument(shell, inner)
            # Such a variable is asked for.
            if branches.may_run() and not FROM_ARGUMENT.match(inner[0]):
                shell.maybe.append(one)


def _subshells(shell: Shell, command: Command) -> None:
    """Begins and ends subshells, whose folder and variables are lost at their end."""
    for _ in range(command.opens):
        if shell.all_subshells == MOST_PARTS:
            return
        shell.all_subshells += 1
        shell.subshells.append((shell.folder, {**shell.values}, {**shell.exported}))
    if command.words == (")",) and shell.subshells:
        shell.folder, values, exported = shell.subshells.pop()
        _back(shell, values, exported)


def _behind_word(shell: Shell, words: list[str]) -> list[str]:
    """The command behind a word of a shell, such as `do` and `until`."""
    first = words[0]
    if first in ("for", "while", "until"):
        shell.open_loops.append(" ".join(words))
    if first == "done":
        del shell.open_loops[-1:]
    if first == "for":
        if words[2:3] == ["in"]:
            shell.loops[words[1]] = " ".join(words[3:])
        return []
    behind = words[2:] if words[1:2] == ["!"] else words[1:]
    if first in ("while", "until"):  # a command that is tried again
        return behind if _launches(behind) or program_of(behind) is not None else []
    return behind


FROM_ARGUMENT = re.compile(r"([A-Za-z_]\w*)=[\"']?\$\{?[1-9]")


def _ask_for_argument(shell: Shell, words: list[str]) -> None:
    """Forgets an empty variable that the script sets from its own arguments, as in
    `--model) MODEL=$2`. So it stays in the spec as a variable, which a person sets."""
    for word in words:
        found = FROM_ARGUMENT.match(word)
        if found is not None and shell.values.get(found[1]) == "":
            del shell.values[found[1]]


FUNCTION = re.compile(
    r"^[ \t]*(?:function[ \t]+([\w-]+)(?:[ \t]*\(\))?|([\w-]+)[ \t]*\(\))\s*"
    r"\{(?:(.{0,20000}?)^[ \t]*\}|([^\n]{0,2000}?;)[ \t]*\}[ \t]*$)",
    re.MULTILINE | re.DOTALL,
)


def _without_functions(text: str, found: dict[str, str]) -> str:
    """`text` with empty lines in place of its functions, which run where they are called."""

    def taken(one: re.Match[str]) -> str:
        found[one[1] or one[2]] = one[3] or one[4]
        return "\n" * one[0].count("\n")

    # A text with more of them would take too long, and is no script of a person.
    few = text.count("()") + text.count("function") <= MOST_PARTS
    return FUNCTION.sub(taken, text) if few else text


ARGUMENTS = re.compile(r'"?\$(?:([@*])|\{([@*])\})"?')


SHIFT = re.compile(r"(?<![\w-])shift\b(?:[ \t]+(\d{1,3}))?")


def _called(body: str, arguments: list[str]) -> str:
    """The body of a function with its arguments."""
    parts, begin = [], 0
    for shift in SHIFT.finditer(body):
        parts.append(_with(body[begin : shift.start()], arguments))
        arguments, begin = arguments[int(shift[1] or 1) :], shift.end()
    return "".join((*parts, _with(body[begin:], arguments)))


def _with(body: str, arguments: list[str]) -> str:
    text = ARGUMENTS.sub(lambda _: " ".join(arguments), body)
    for number, value in enumerate(arguments[:9], start=1):
        of_number = re.compile(rf"\$(?:{number}(?!\d)|\{{{number}\}})")
        text = of_number.sub(value.replace("\\", r"\\"), text)
    return text


def _command(shell: Shell, command: Command, depth: int) -> None:
    words = list(command.words)
    first = words[0]
    if first == "let":
        for word in words[1:]:
            name, _, value = word.strip("\"'").partition("=")
            text = value.removeprefix("$((").removesuffix("))")
            _assign(shell, f"{name}=$(({text}))", exported=False)
    elif first in ("export", "declare", "typeset", "readonly", "local"):
        exports = first == "export" or "-x" in words
        for word in words[1:]:
            _assign(shell, word, exported=exports)
            if exports and word.strip('"').startswith(("$(", "`")):  # $(cat .env | xargs)
                shell.others.append((command.line, command.text))
    elif first == ":":  # : "${VAR:=default}"
        [joined(word, shell.values) for word in words[1:]]
    elif all(ASSIGNMENT.fullmatch(word) for word in words):
        for word in words:
            _assign(shell, word, exported=False)
    else:
        _run(shell, command, depth)


def _assign(shell: Shell, word: str, *, exported: bool) -> None:
    found = ASSIGNMENT.fullmatch(word)
    if found is None:
        name = word.strip("\"'")
        if exported and isinstance(value := shell.values.get(name), str):
            shell.exported[name] = value
        return
    name, adds, raw = found.groups()
    raw = _unshifted(shell, raw)
    if raw.startswith("("):
        inside = commands_in(raw[1:-1])
        parts = [one for part in inside if part.words[0] not in MARKS for one in part.words]
        items = [one for part in parts for one in expanded(part, shell.values)]
        before = shell.values.get(name, [])
        shell.values[name] = [*(before if adds and isinstance(before, list) else []), *items]
        return
    if not set("'\"") & set(raw):
        raw = re.sub(r"(^|:)~(?=[/:]|$)", r"\1${HOME}", raw)
    value = joined(raw, shell.values)
    known = shell.values.get(name, "")
    shell.values[name] = f"{known}{value}" if adds and isinstance(known, str) else value
    if exported or shell.exports_all or name in shell.exported:
        shell.exported[name] = value


ARGUMENT = re.compile(r"\$(?:([1-9])(?!\d)|\{([1-9]))")


def _shift(shell: Shell, command: Command, depth: int) -> None:
    if command.words[0] != "shift" or depth:  # a function has arguments of its own
        return
    count = "".join(command.words[1:2])
    shell.shifted += int(count) if re.fullmatch(r"\d{1,3}", count) else 1


def _unshifted(shell: Shell, word: str) -> str:
    """`word` with the number that an argument had before `shift`."""

    def number(found: re.Match[str]) -> str:
        count = int(found[1] or found[2]) + shell.shifted
        if found[2]:
            return f"${{{count}"
        return f"${count}" if count < 10 else f"${{{count}}}"

    return ARGUMENT.sub(number, word) if shell.shifted else word


def _run(shell: Shell, command: Command, depth: int) -> None:
    _shift(shell, command, depth)
    raw = [_unshifted(shell, word) for word in redirected(list(command.words))]
    words = _expanded(shell, raw)
    before = []
    while words and ASSIGNMENT.fullmatch(words[0]):
        before.append(words.pop(0))
    if not words or not words[0]:
        return
    name = PurePath(words[0]).name or words[0]  # `.` has no name
    _export_of_mpiexec(shell, words)
    if _changes_environment(shell, name, words):
        pass
    elif name in QUIET or name.startswith("[") or words[:2] == ["scontrol", "show"]:
        _written(shell, command, len(raw))
    elif name == "eval" and depth < MOST_DEPTH and shell.calls < MOST_PARTS:
        shell.calls += 1
        _read(shell, for_inner_shell(" ".join(words[1:])), depth + 1, command.line)
    elif words[0] in shell.functions and depth < MOST_DEPTH and shell.calls < MOST_PARTS:
        shell.calls += 1
        body = _called(shell.functions[words[0]], list(command.words[1:]))
        _read(shell, body, depth + 1, command.line)
    elif (inner := _inner(words)) is not None and depth < MOST_DEPTH:
        at = words.index(inner)
        outer = words[:at]
        if arguments := words[at + 2 :]:  # behind the script's name
            inner = _called(inner, [*map(shlex.quote, arguments)])
        outside = _assigned(shell, before)
        _read_inner(shell, inner, outer, depth, command.line)
        _forget(shell, outside)
    elif program_of(words) is not None or name in COMMANDS or launched(words):
        _start(shell, command, before, words)
    else:
        shell.others.append((command.line, command.text))


def _expanded(shell: Shell, raw: list[str]) -> list[str]:
    """The words of a command. In the script of `bash -c` an opaque variable stays one."""
    found = [expanded(word, shell.values) for word in raw]
    words = [one for each in found for one in each]
    if (inner := _inner(words)) is None:
        return words
    plain = {name: value for name, value in shell.values.items() if not _is_opaque(value)}
    return [
        one
        for word, each in zip(raw, found, strict=True)
        for one in (expanded(word, plain) if inner in each else each)
    ]


def _changes_environment(shell: Shell, name: str, words: list[str]) -> bool:
    """Whether a command is one that changes the folder, the variables or the environment."""
    args = words[1:]
    if name in ("cd", "pushd") and args:
        _to_folder(shell, args[0])
    elif name == "popd":
        _to_folder(shell, "-")
    elif name in PREPARES and args[:1] != ["run"]:  # `conda run` starts the program
        line = " ".join(words)
        shell.setup.append(f"set -a; {line}; set +a" if shell.exports_all else line)
    elif name == "set":
        on = args in (["-a"], ["-o", "allexport"])
        shell.exports_all = on or (shell.exports_all and args not in (["+a"], ["+o", "allexport"]))
    else:
        return name == "unset" and (shell.starts != [] or _unset(shell, args))
    return True


def _to_folder(shell: Shell, to: str) -> None:
    """What `cd TO` does; `-` is the folder before."""
    if to == "-":
        shell.folder = shell.folders.pop() if shell.folders else None
    else:
        shell.folders.append(shell.folder)
        shell.folder = folder_behind(shell.folder, to)
    shell.values["PWD"] = folder_behind(shell.at_start, shell.folder or ".")


def _unset(shell: Shell, names: list[str]) -> bool:
    """Forgets variables of the script. False: it has none of these, so a job may inherit one."""
    known = [name for name in names if name in shell.values or name in shell.exported]
    for name in known:
        shell.values.pop(name, None)
        shell.exported.pop(name, None)
    return known == [name for name in names if not name.startswith("-")]


def _is_opaque(value: str | list[str]) -> bool:
    """Whether a value is one `$( … )` with quotes. They would end the quotes around the variable in
    the script of `bash -c`, so the variable stays one until that script is read."""
    return isinstance(value, str) and QUOTES_INSIDE.fullmatch(value) is not None


QUOTES_INSIDE = re.compile(r"[^\s'\"]*\$\([^'\"]*['\"].*\)[^\s'\"]*", re.DOTALL)


def _export_of_mpiexec(shell: Shell, words: list[str]) -> None:
    """The variables of `mpiexec -genv NAME VALUE`."""
    if not any(PurePath(word).name.startswith(("mpiexec", "mpirun")) for word in words):
        return
    for flag, name, value in zip(words, words[1:], words[2:], strict=False):
        if flag in ("-genv", "-env"):
            _assign(shell, f"{name}={value}", exported=True)


def _written(shell: Shell, command: Command, at: int) -> None:
    """Keeps the files that a line such as `echo TEXT > FILE` or `… | tee FILE` writes. `at`: where
    its redirections begin."""
    files = re.findall(r"(?<!\S)[0-9&]?>>?\s*([^\s>&|]+)", " ".join(command.words[at:]))
    if command.words[0] == "tee":
        files += [word for word in command.words[1:at] if not word.startswith("-")]
    names = [joined(file, shell.values) for file in files]
    shell.written += [
        (command.line, file, command.text) for file in names if not file.startswith("/dev/")
    ]


def _start(shell: Shell, command: Command, before: list[str], words: list[str]) -> None:
    """A command line that starts a program, with the variables before it or after `env`."""
    in_env = words if "env" in words else []
    given = [*before, *takewhile(lambda one: not one.endswith(".py"), in_env)]
    outside = _assigned(shell, given)
    found = program_of(words)
    before_program = words[: len(words) - len(found.args)] if found is not None else words
    in_box = any(PurePath(word).name in RUNTIMES for word in words)
    for flag, word in pairwise(before_program):
        # -x of mpirun, and -e of tmux. Containers keep their -e in the command line.
        if (flag == "-x" or (flag == "-e" and not in_box)) and ASSIGNMENT.fullmatch(word):
            _assign(shell, word, exported=True)
    raw = redirected(list(command.words))
    _written(shell, command, len(raw))
    expands = tuple(one for word in raw for one in patterns(word, shell.values))
    one = Start(command.line, tuple(words), command.text, patterns=expands)
    loop = shell.open_loops[-1] if shell.open_loops else None
    reads = "| before it" if command.after == "|" else _reads(list(command.words[len(raw) :]))
    _add(shell, replace(one, loop=loop, reads=reads))
    _forget(shell, outside)


def _add(shell: Shell, start: Start) -> None:
    few = len(shell.starts) < MOST_PARTS  # else it would take too long
    exported = {**shell.exported} if few else shell.exported
    shell.starts.append(replace(start, folder=shell.folder, exported=exported))


Outside = Mapping[str, tuple[str | list[str] | None, str | None]]
"""The values, and the exported values, that variables had before a command; None: none."""


def _assigned(shell: Shell, words: list[str]) -> Outside:
    """Sets the variables of one command, as in `A=1 srun …`."""
    found = [match[1] for word in words if (match := ASSIGNMENT.fullmatch(word)) is not None]
    outside = {name: (shell.values.get(name), shell.exported.get(name)) for name in found}
    for word in words:
        if ASSIGNMENT.fullmatch(word):
            _assign(shell, word, exported=True)
    return outside


def _forget(shell: Shell, outside: Outside) -> None:
    """Takes the variables of a command back behind it."""
    for name, (value, exported) in outside.items():
        shell.values.pop(name, None)
        shell.exported.pop(name, None)
        if value is not None:
            shell.values[name] = value
        if exported is not None:
            shell.exported[name] = exported


def _back(shell: Shell, values: Values, exported: dict[str, str]) -> None:
    """Forgets the variables that a subshell had."""
    shell.values.clear()
    shell.values.update(values)
    shell.exported = exported


def _reads(redirections: list[str]) -> str | None:
    """`< FILE`, `<<< TEXT` or `<<EOF` of a command."""
    for at, word in enumerate(redirections):
        if re.match(r"0?<(?![&(])", word):
            alone = re.fullmatch(r"0?<+-?", word) is not None
            text = " ".join(redirections[at : at + 1 + alone])
            return None if "/dev/null" in text else text
    return None


def _read_inner(shell: Shell, inner: str, outer: list[str], depth: int, line: int) -> None:
    """The script of `bash -c`. The words before it have the hosts and the container."""
    count, others = len(shell.starts), len(shell.others)
    script = for_inner_shell(inner)
    if not any(PurePath(word).name in RUNTIMES for word in outer):
        _read(shell, script, depth + 1, line)
        if len(shell.starts) == count and len(shell.others) > others and _launches(outer):
            # Its last line is what srun starts: a script, or a program without Python.
            text = shell.others.pop()[1]
            words = [one for word in text.split() for one in expanded(word, shell.values)]
            _add(shell, Start(line, tuple(words), text))
        shell.starts[count:] = [
            replace(one, words=(*outer, *one.words)) for one in shell.starts[count:]
        ]
        return
    # What it prepares, it prepares in the container, which the host's own shell cannot do.
    inside = Shell(values=shell.values, functions=shell.functions)
    _read(inside, script, depth + 1, line)
    start = inside.training()
    if start is None:
        shell.others.append((line, " ".join(outer)))
        return
    texts = [one.text for one in commands_in(script) if one.words[0] not in MARKS]
    # `time` before a command is no part of the start.
    here = next((at for at, one in enumerate(texts) if one.endswith(start.text)), 0)
    of_both = [one.text for one in commands_in(inner) if one.words[0] not in MARKS]
    before = tuple(one.replace(LITERAL, "${") for one in of_both[:here])
    loop = shell.open_loops[-1] if shell.open_loops else start.loop
    _add(shell, replace(start, words=(*outer, *start.words), before=before, loop=loop))
    after = [one for one in texts[here + 1 :] if one.split()[0] not in QUIET]
    shell.others += [(line, f"{one} (in the container, after the program)") for one in after]


def _launches(words: list[str]) -> bool:
    return any(map(is_launcher, words))


def folder_behind(before: str | None, to: str) -> str:
    """The folder that `cd TO` leads to."""
    if to.startswith("/") and "$" not in to:
        return posixpath.normpath(to)
    return to if before is None or to.startswith(("/", "$")) else str(PurePath(before, to))


def _inner(words: list[str]) -> str | None:
    """The script of `bash -c SCRIPT`."""
    for at, word in enumerate(words[:-2]):
        if PurePath(word).name == "ssh" and re.search(r"\s", words[-1]):
            return words[-1]
        if PurePath(word).name in SHELLS:
            for flag, script in zip(words[at + 1 :], words[at + 2 :], strict=False):
                if re.fullmatch(r"-[a-z]*c", flag):
                    # `bash -c -- SCRIPT`, as in manifests.
                    after = words[words.index(script, at) + 1 :]
                    return after[0] if script == "--" and after else script
                if not flag.startswith("-"):
                    break
    return None


def variables(shell: Shell) -> Iterator[tuple[str, str]]:
    """The exported variables that ranks should have, and those that only the shell knows."""
    for name, value in shell.exported.items():
        if not OF_NDCTL.fullmatch(name):
            yield name, value
