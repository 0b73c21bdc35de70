"""Which branches of a script run: `if`, `case`, and commands behind `&&` and `||`."""

import re
from fnmatch import fnmatchcase

from msgspec import Struct

from orchestrator.specs.foreign.shell.words import MARKS, Values, joined

TESTS = ("[", "[[", "test")
SIGNS = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")


class Case(Struct):
    """An open `case`."""

    subject: str | None
    """None: only a shell knows it."""
    patterns: list[str] | None
    """The patterns before `)`, as far as they are read; None: a branch is open."""


class Branches:
    """Follows the commands of a script, one by one."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._entered: list[str] = []
        """For each open `if` or `case`, `yes` while its branch runs, `no` before, `done` after."""
        self._unknown: list[bool] = []
        """For each of them, whether only a shell knows if the branch that is read runs."""
        self._holds: bool | None = None
        """Whether the condition between `if` and `then` holds so far."""
        self._in_condition = False
        self._tested: bool | None = None
        """The result of the test before `&&` or `||`; None: no test, or only a shell knows."""
        self._skips = False
        self._cases: list[Case] = []

    def commands(self, words: list[str], after: str) -> list[str] | None:
        """The command that follows on words of `if`; None: the words are its condition."""
        first = words[0]
        if first in MARKS or (self.reads_patterns() and first != "esac"):
            self._pattern(words)
            return None
        while words and words[0] in ("then", "else", "do", "{"):  # another `if` may be behind it
            self._enter(words[0])
            words = words[1:]
        self._skip(words, after)
        if not words:
            return []
        first = words[0]
        if first in ("if", "elif"):
            self._open(first)
            self._holds = holds(words[1:], self._values)
            self._in_condition = True
            return None
        if self._in_condition:
            self._holds = _both(self._holds, holds(words, self._values), after)
            return None
        if first == "case":
            text = joined("".join(words[1:2]), self._values)
            subject = None if set("$`") & set(text) else text
            self._entered.append("no")
            self._unknown.append(subject is None)
            self._cases.append(Case(subject, words[3:]))
            return None
        return self._close(words)

    def reads_patterns(self) -> bool:
        """Whether the next words are patterns of `case`."""
        return bool(self._cases) and self._cases[-1].patterns is not None

    def _pattern(self, words: list[str]) -> None:
        """Reads `a | b)` and `;;` of the last `case`."""
        case = self._cases[-1] if self._cases else None
        if case is None or not self._entered:
            return  # the end of a subshell
        if words == [";;"]:
            case.patterns = []
            if self._entered[-1] == "yes":
                self._entered[-1] = "done"
        elif words != [")"]:
            case.patterns = [*(case.patterns or ()), *words]
        elif case.patterns is not None:
            given = [joined(one, self._values) for one in case.patterns]
            case.patterns = None
            if any(set("$`") & set(one) for one in given):
                case.subject = None  # this branch may run, so no later one is known to
            subject = case.subject
            matches = subject is not None and any(fnmatchcase(subject, one) for one in given)
            if matches and self._entered[-1] == "no":
                self._entered[-1] = "yes"

    def run(self) -> bool:
        """Whether the command that was given last runs."""
        return not self._skips and set(self._entered) <= {"yes"}

    def may_run(self) -> bool:
        """Whether only a shell knows if the command that was given last runs."""
        around = zip(self._entered, self._unknown, strict=True)
        known = {one for one, unknown in around if not unknown}
        return not self.run() and not self._skips and known <= {"yes"}

    def runs_condition(self, first: str) -> bool:
        """Whether the command behind `if` or `elif`, which follows, runs."""
        around = self._entered[:-1] if first == "elif" else self._entered
        last = self._entered[-1:] if first == "elif" else []
        return set(around) <= {"yes"} and last in ([], ["no"])

    def _open(self, first: str) -> None:
        if first == "if":
            self._entered.append("no")
            self._unknown.append(False)
        elif self._entered:
            self._entered[-1] = "done" if self._entered[-1] in ("yes", "done") else "no"

    def _enter(self, word: str) -> None:
        last = self._entered[-1] if self._entered else None
        if word == "then":
            self._in_condition = False
            if last is not None:
                self._unknown[-1] = self._holds is None and last == "no"
            if self._holds and last == "no":
                self._entered[-1] = "yes"
        elif word == "else" and last is not None:
            self._unknown[-1] = False
            self._entered[-1] = "yes" if last == "no" else "done"

    def _close(self, words: list[str]) -> list[str]:
        first = words[0]
        if first not in ("fi", "esac"):
            return words
        if self._entered:
            self._entered.pop()
            self._unknown.pop()
        if first == "esac" and self._cases:
            self._cases.pop()
        return words[1:]

    def _skip(self, words: list[str], after: str) -> None:
        """Whether a test before `&&` or `||` says that this command does not run."""
        if after not in ("&&", "||"):
            self._tested = None
        known = (
            self._tested if after == "&&" else None if self._tested is None else not self._tested
        )
        self._skips = known is False
        if words and words[0] in TESTS and not self._skips:
            self._tested = holds(words, self._values)


def _both(left: bool | None, right: bool | None, after: str) -> bool | None:
    """The result of two commands of a condition. `;` leaves that of the second."""
    if after == "&&":
        return bool(left and right)
    return (left or right) if after == "||" else None if after == "|" else right


def holds(words: list[str], values: Values) -> bool | None:
    """Whether `[ … ]` holds. None: only a shell knows."""
    if "||" in words:
        return any(holds(part, values) for part in _parts(words, "||"))
    if "&&" in words:
        return all(_part_holds(part, values) for part in _parts(words, "&&"))
    return _part_holds(words, values)


def _parts(words: list[str], sign: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for word in words:
        if word == sign:
            found.append([])
        else:
            found[-1].append(word)
    return found


def _part_holds(words: list[str], values: Values) -> bool | None:
    given = [joined(word, values) for word in words if word not in (*TESTS, "]", "]]")]
    # A variable that nothing sets is empty in a shell, but a job has those of Slurm.
    given = [re.sub(r"\$\{(?!SLURM_)\w+\}", "", word) for word in given]
    if given[:1] == ["!"]:
        return len(given) > 1 and given[1] != "!" and not _result(given[1:], words)
    return _result(given, words)


def _result(given: list[str], words: list[str]) -> bool | None:
    match given:
        case ["-z", *text]:
            return not any(text)
        case ["-n", *text]:
            return any(text)
        case [left, sign, right] if sign in SIGNS:
            # Inside of `[[ … ]]` an empty text is the number 0.
            left, right = (one or ("0" if "[[" in words else "") for one in (left, right))
            return _compared(left, sign, right)
        case [left, "=" | "==", right] if not set("*?") & set(right):
            return left == right
        case [left, "!=", right] if not set("*?") & set(right):
            return left != right
    return None


def _compared(left: str, sign: str, right: str) -> bool | None:
    if not (left.isdecimal() and right.isdecimal()):
        return None
    small, same = int(left) < int(right), int(left) == int(right)
    return {
        "-eq": same, "-ne": not same, "-lt": small, "-le": small or same,
        "-gt": not (small or same), "-ge": not small,
    }[sign]  # fmt: skip
