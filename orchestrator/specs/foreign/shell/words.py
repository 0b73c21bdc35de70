"""Splits a script of a shell into commands of raw words, and expands the words.

It reads what batch scripts have: assignments, arrays, quotes, defaults. It runs nothing. What only
a shell knows, such as `$(hostname)`, stays in the text.
"""

import re
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import pairwise

from msgspec import Struct

from orchestrator.specs.foreign.shell.own_path import computed

MOST_CHARACTERS = 200_000
"""Longer expansions are cut: variables that name each other may grow without end."""
MOST_PARTS = 200
"""Most functions, calls of functions, and here-documents of a script that are followed."""
END_OF_COMMAND = "\n;&|"
MARKS = (")", ";;")
"""Commands of their own, as they end a pattern and a branch of `case`. `)` also ends a subshell."""
NAME = r"[A-Za-z_]\w*"
VARIABLE = re.compile(
    r"\\(?P<sign>.)"
    rf"|\$\{{(?P<braced>{NAME}|[1-9])(?:\[[@*]\])?"
    r"(?:(?P<how>:?[-=+?])(?P<default>(?:[^{}]|\{[^{}]*\})*))?\}"
    rf"|\$(?P<plain>{NAME})",
    re.DOTALL,
)
"""A variable, or a sign behind a backslash, which begins none."""
LITERAL = "\x01{"
"""`${` that begins no variable, as it is in single quotes or behind a backslash."""
OF_NO_VARIABLE = re.compile(rf"\$\{{(?={NAME}(?:\}}|-|:?[?+=]|:-))")
"""Where a spec would see a variable. `${a.b}` and `${now:%Y}` are none for it either."""
COMMENT_THAT_SEEMS_JOINED = re.compile(r"^([ \t]*#.*?)\\+\r?$", re.MULTILINE)


PLACEHOLDER = re.compile(r"<[A-Za-z](?:[^<>|&;\n\"'`$]*[\w.)])?>")
"""`<PATH TO DATA>` of a template. To a shell it is a file to read and another to write."""


IN_DOUBLE_BRACES = re.compile(r"(?<!\$)\{\{-? *([A-Za-z_]\w*(?:\.\w+)*)(?: *\|[^{}\n]*)? *-?\}\}")
"""`{{ config }}` or `{{ a.b | filter }}` of a template, which no shell has."""
OF_TEMPLATE = re.compile(rf"{IN_DOUBLE_BRACES.pattern}|(?<!\$)\{{ *([A-Za-z]\w*) *\}}")


OWN_ARGUMENTS = re.compile(r"\"?\$(?:[@*]|\{[@*](?::[^{}]*)?\})\"?")
"""The arguments of the script itself, which a spec does not have."""


class Command(Struct, frozen=True):
    """Words as they are written, with their quotes."""

    line: int
    words: tuple[str, ...]
    after: str = ""
    """`&&`, `||` or `|`, if that joins it to the command before; or the mark that is before it."""
    opens: int = 0
    """The subshells that begin with it, as in `(cd data && python prepare.py)`."""

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def commands_in(text: str) -> Iterator[Command]:
    """The commands of a script, without its comments."""
    text = _with_joined_lines(text)
    at, line, words = 0, 1, list[str]()
    started, after, in_test, opens = 1, "", False, 0
    while at < len(text):
        sign = text[at]
        if in_test and (part := _part_of_test(text, at, words)) is not None:
            words += [part] if part.strip() else []
            line += part.count("\n")
            at += len(part)
        elif sign in END_OF_COMMAND or sign == ")":
            if words:
                yield Command(started, tuple(words), after, opens)
                words, after, in_test, opens = [], "", False, 0
            joins = re.match(r"&&|\|\|?|;;|\)", text[at : at + 2])
            after = joins[0] if joins else after if sign == "\n" else ""
            if joins and joins[0] in MARKS:
                yield Command(line, (joins[0],))
            line += sign == "\n"
            at += len(joins[0]) if joins else 1
        elif text.startswith("((", at):  # arithmetic, as in `for ((i = 0; i < 8; i++))`
            end = _end_of_brackets(text, at)
            line += text.count("\n", at, end)
            at = end
        elif sign.isspace() or sign in "\x00(":
            line += sign == "\x00"
            opens += sign == "(" and not text[at - 1 : at].isalnum()  # not as in `f()`
            at += 1
        elif sign == "#":
            at = end if (end := text.find("\n", at)) >= 0 else len(text)
        else:
            started = started if words else line
            end = _end_of_word(text, at)
            word = text[at:end]
            line += word.count("\n") + word.count("\x00")
            words.append(word.replace("\x00", ""))
            in_test = word == "[[" or (in_test and word != "]]")
            at = end
    if words:
        yield Command(started, tuple(words), after, opens)


def _with_joined_lines(text: str) -> str:
    # A comment ends with its line, also if the line ends with a backslash.
    text = COMMENT_THAT_SEEMS_JOINED.sub(r"\1", text)
    return text.replace("\\\r\n", " ").replace("\\\n", " \x00")  # \0 counts the joined lines


def _part_of_test(text: str, at: int, words: list[str]) -> str | None:
    """A sign inside of `[[ … ]]` that ends a command elsewhere; None: none is here."""
    if text[at : at + 2] in ("&&", "||"):
        return text[at : at + 2]
    if text[at] == "\n":
        return "\n" if words[-1] in ("&&", "||") else None
    return text[at] if text[at] in "()|" else None


DOCUMENT = re.compile(
    r"^(?P<line>[^#\n]*?(?<!<)<<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)[^\n]*)\n"
    r"(?P<body>.{0,20000}?)^[ \t]*(?P=end)[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
"""A here-document: `cat > FILE <<EOF`, its lines, and EOF."""
READS_VARIABLE = re.compile(r"\bread\b[^|;]*-d *(?:\"\"|'') *([A-Za-z_]\w*) *<<")
"""`read -d '' NAME <<EOF`: the lines are the value of a variable."""
STARTS = re.compile(r"\b(python[\d.]*|torchrun|srun|mpirun|mpiexec|accelerate|deepspeed)\s")
READS_COMMANDS = re.compile(r"\b(sbatch|bash|sh|zsh)\b[^|>]*<<")


def without_documents(text: str, files: list[tuple[int, str]]) -> str:
    """`text` without the lines of here-documents, unless a shell reads them. `files`: gets the
    lines that write one."""

    def taken(one: re.Match[str]) -> str:
        if (variable := READS_VARIABLE.search(one["line"])) is not None:
            value = one["body"].replace('"', r"\"")
            return f'\n{variable[1]}="{value}"'
        if READS_COMMANDS.search(one["line"]):
            return f"\n{one['body']}"
        writes = ">" in one["line"] or "tee" in one["line"].split()
        if writes and not STARTS.search(one["line"]):
            files.append((text.count("\n", 0, one.start()) + 1, one["line"].strip()))
            return "\n" * one[0].count("\n")
        return one["line"] + "\n" * one[0].count("\n")

    # A text with more of them would take too long, and is no script of a person.
    return DOCUMENT.sub(taken, text) if text.count("<<") <= MOST_PARTS else text


def _end_of_word(text: str, at: int) -> int:
    while at < len(text):
        sign = text[at]
        if sign == "\\":
            at += 2
        elif sign in "'\"`":
            at = _end_of_quote(text, at)
        elif sign in "<{" and (placeholder := _placeholder_at(text, at)):
            at = placeholder.end()
        elif sign == "(" and text[at - 1] in "$=<>":
            at = _end_of_brackets(text, at)
        elif sign == "{" and text[at - 1] == "$":
            at = _end_of_braces(text, at)
        elif text[at : at + 2] in (">&", ">|"):  # 2>&1
            at += 2
        elif sign.isspace() or sign in END_OF_COMMAND or sign in "()\x00":
            return at
        else:
            at += 1
    return len(text)


def _placeholder_at(text: str, at: int) -> re.Match[str] | None:
    return PLACEHOLDER.match(text, at) or IN_DOUBLE_BRACES.match(text, at)


def _end_of_quote(text: str, at: int) -> int:
    quote, at = text[at], at + 1
    while at < len(text) and text[at] != quote:
        if quote == '"' and text[at : at + 2] == "$(":
            at = _end_of_brackets(text, at + 1)
        elif quote == '"' and text[at : at + 2] == "${":
            at = _end_of_braces(text, at + 1)
        else:
            at += 2 if text[at] == "\\" and quote != "'" else 1
    return at + 1


def _end_of_braces(text: str, at: int) -> int:
    """The end of `{ … }` of a variable, whose default may have quotes and variables."""
    depth = 0
    while at < len(text):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at = _end_of_quote(text, at) if text[at] in "'\"" else at + 1
        if depth == 0:
            return at
    return len(text)


def _end_of_brackets(text: str, at: int) -> int:
    """The end of `( … )`, with quotes and brackets inside."""
    depth = 0
    while at < len(text):
        if text[at] in "'\"":
            at = _end_of_quote(text, at)
            continue
        if text[at] == "#" and text[at - 1].isspace():
            at = end if (end := text.find("\n", at)) >= 0 else len(text)
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return at
    return len(text)


Values = MutableMapping[str, "str | list[str]"]


def expanded(word: str, values: Values) -> list[str]:
    """The words that a raw word becomes. A variable without a value stays, as `${VAR}`."""
    # A shell does so at the start of a word and of a value, but not in `--out=~/x`.
    word = re.sub(rf"^({NAME}=)?~(?=/|$)", r"\1${HOME}", word)
    if (array := re.fullmatch(rf'("?)\$\{{({NAME})\[([@*])\]\}}"?', word)) is not None:
        value = values.get(array[2], [])
        items = list(value) if isinstance(value, list) else [value]
        if array[1]:
            return items if array[3] == "@" else [" ".join(items)]
        # Without quotes a shell splits each item at its spaces, and drops empty ones.
        return [one for item in items for one in _fields(item) if one]
    pieces = [*_pieces(word)]
    if all(quoted for _, quoted in pieces):
        return ["".join(_value(piece, values, quoted) for piece, quoted in pieces)]
    found, at_end = [""], True
    for piece, quoted in pieces:
        text = _value(piece, values, quoted)
        parts = [text] if quoted else _fields(text)
        found[-1] += parts[0]
        found += parts[1:]
        at_end = not quoted
    return [one for one in found if one or not at_end]


def patterns(word: str, values: Values) -> list[str]:
    """The words of a raw word that a shell would replace with names of files or with alternatives,
    such as `data/*.json` and `{a,b}` without quotes."""
    texts = [_value(piece, values, quoted) for piece, quoted in _pieces(word) if not quoted]
    if not any(PATTERN.search(ONLY_A_SHELL.sub("", text)) for text in texts):
        return []
    found = expanded(word, values)
    return [one for one in found if PATTERN.search(ONLY_A_SHELL.sub("", one))]


ONLY_A_SHELL = re.compile(r"\$\{[^{}]*\}|\$\(.*\)|`.*`|\$[*@]", re.DOTALL)
PATTERN = re.compile(r"\*\.\w|/\S*\*|\*\S*/|\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")
"""Other words with `*`, such as `--layers=[0]*3`, and with `?` or `[ab]` rarely match a file."""


def _fields(text: str) -> list[str]:
    """`text` split at its spaces, except inside of `$( … )`, `<( … )`, `${ … }` and of a
    placeholder."""
    found, at = [""], 0
    while at < len(text):
        end = at + 1
        if text.startswith(("$(", "<(", ">("), at):
            end = _end_of_brackets(text, at + 1)
        elif text.startswith("${", at):
            end = _end_of_braces(text, at + 1)
        elif text[at] == "`":
            end = _end_of_quote(text, at)
        elif placeholder := _placeholder_at(text, at):
            end = placeholder.end()
        if text[at].isspace():
            if not text[at - 1].isspace() or at == 0:
                found.append("")
        else:
            found[-1] += text[at:end]
        at = end
    return found


def joined(word: str, values: Values) -> str:
    """The one text that a word becomes on the right side of an assignment."""
    return "".join(_value(piece, values, quoted) for piece, quoted in _pieces(word))


SINGLE, DOUBLE = "'", '"'
ESCAPED = '$"\\`'
"""What a backslash keeps as it is in double quotes."""
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
"""Of `$'a\\tb'`."""


def _pieces(word: str) -> Iterator[tuple[str, str]]:
    """Parts of a word, and the quote around each."""
    at = 0
    while at < len(word):
        if word[at] in "'\"":
            end = _end_of_quote(word, at)
            yield word[at + 1 : end - 1], word[at]
        elif word.startswith("$'", at):
            end = _end_of_quote(word, at + 1)
            text = word[at + 2 : end - 1]
            yield re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), text), SINGLE
        elif placeholder := PLACEHOLDER.match(word, at):
            end = placeholder.end()
            yield word[at:end], SINGLE  # its spaces do not part it
        else:
            end = at
            while end < len(word) and not _ends_piece(word, end):
                end = _end_of_sign(word, end)
            yield word[at:end], ""
        at = max(end, at + 1)


def _ends_piece(word: str, at: int) -> bool:
    return word[at] in "'\"" or word.startswith("$'", at) or PLACEHOLDER.match(word, at) is not None


def _end_of_sign(word: str, at: int) -> int:
    """The end of `$( … )`, of `${ … }`, of a sign after a backslash, or of one sign."""
    if word.startswith("$(", at):
        return _end_of_brackets(word, at + 1)
    if word.startswith("${", at):
        return _end_of_braces(word, at + 1)
    return at + (2 if word[at] == "\\" else 1)


def _value(piece: str, values: Values, quoted: str) -> str:
    if quoted == SINGLE:
        return OF_NO_VARIABLE.sub(LITERAL, piece)

    def value(found: re.Match[str]) -> str:
        if (sign := found["sign"]) is None:
            return _braced(found, values) if found["braced"] else _of(found["plain"], values)
        if sign == "$" and OF_NO_VARIABLE.match(piece, found.end() - 1):
            return LITERAL[0]
        return sign if not quoted or sign in ESCAPED or sign.isspace() else found[0]

    text = VARIABLE.sub(value, piece)
    text = _with_sums(text, values)
    text = re.sub(r"\$\(pwd\)|`pwd`", lambda _: _of("PWD", values), text)
    return IN_DOUBLE_BRACES.sub(_variable, computed(text))[:MOST_CHARACTERS]


QUOTED = re.compile(r"\\.|\"(?:\\.|[^\"\\])*\"|'[^']*'", re.DOTALL)


def for_inner_shell(script: str) -> str:
    """A script that another shell has read before, as in `bash -c "… '${NAME}'"`.

    A variable there is one also in single quotes, because they did not stop the first shell; and
    what that shell kept is for the second.
    """

    def opened(one: re.Match[str]) -> str:
        return re.sub(r"\$\{[^{}]*\}", r"""'"\g<0>"'""", one[0]) if one[0][0] == SINGLE else one[0]

    return QUOTED.sub(opened, script).replace(LITERAL, "${")


def _of(name: str, values: Mapping[str, str | list[str]]) -> str:
    value = values.get(name, f"${{{name}}}")
    return value if isinstance(value, str) else " ".join(value)


def _braced(found: re.Match[str], values: Values) -> str:
    name, sign, default = found["braced"], found["how"], found["default"]
    if sign is not None and "+" in sign:  # the text only if the variable is set
        return joined(default, values) if values.get(name) else ""
    if name in values or sign is None or "?" in sign:
        return _of(name, values)
    value = joined(default, values)
    if "=" in sign:
        values[name] = value
    return value


def variables_for_placeholders(text: str) -> str:
    """`text` with variables for `<your account>`, `{account}` and `{{ account }}` of a template,
    which a person must replace before another tool takes it."""
    text = OF_TEMPLATE.sub(_variable, text)
    name = re.compile(r"\W+")
    return PLACEHOLDER.sub(lambda one: f"${{{name.sub('_', one[0]).strip('_').upper()}}}", text)


def _variable(found: re.Match[str]) -> str:
    """The variable for a placeholder of a template."""
    return f"${{{(found[1] or found[2]).replace('.', '_')}}}"


def _with_sums(text: str, values: Values) -> str:
    """`text` with the numbers that its `$(( … ))` are, as far as they are known."""
    found, at = "", 0
    for _ in range(MOST_PARTS):
        if (begin := text.find("$((", at)) < 0:
            break
        end = _end_of_brackets(text, begin + 1)
        known = _sum(text[begin + 3 : end - 2], values) if text.endswith("))", begin, end) else None
        found += text[at:begin] + ("$((" if known is None else known)
        # What is not known may have sums inside, as in `$((echo $((1 + 1))) | cat)`.
        at = begin + 3 if known is None else end
    return found + text[at:]


def _sum(text: str, values: Values) -> str | None:
    """The number that `a * (b + 1)` is, from left to right with the usual priorities."""
    words = re.findall(rf"\d+|{NAME}|\$\{{{NAME}\}}|[-+*/%()]|\S", text)
    known = [
        _of(re.sub(r"\W", "", one), values) if re.search(r"[A-Za-z_]", one) else one
        for one in words
    ]
    if not known or not all(re.fullmatch(r"\d{1,15}|[-+*/%()]", one) for one in known):
        return None
    try:
        found = _Sum(known)
        value = found.value()
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return None if found.words else str(value)


class _Sum:
    def __init__(self, words: list[str]) -> None:
        self.words = words[::-1]

    def value(self) -> int:
        found = self._product()
        while self.words and self.words[-1] in "+-":
            found += self._product() if self.words.pop() == "+" else -self._product()
        return found

    def _product(self) -> int:
        found = self._one()
        while self.words and self.words[-1] in "*/%":
            sign, other = self.words.pop(), self._one()
            found = (
                found * other if sign == "*" else found // other if sign == "/" else found % other
            )
        return found

    def _one(self) -> int:
        word = self.words.pop()
        if word != "(":
            return int(word)
        found = self.value()
        self.words.pop()
        return found


def redirected(words: list[str]) -> list[str]:
    """`words` up to the first redirection of output or input."""
    for at, (word, following) in enumerate(pairwise([*words, ""])):
        if PLACEHOLDER.match(word):
            continue
        if re.match(r"\d?[<>](?!\()|&>", word) and (following or word not in "<>"):
            return words[:at]
    return words
