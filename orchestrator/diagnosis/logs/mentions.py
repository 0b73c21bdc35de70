"""Which lines of a rank's log report that something is broken, and which only speak of it. Pure.

A program that trains on what people wrote prints kernels' words among its samples, a launcher
prints the failures that it looks for, and a check prints what it found on other hosts. What broke
under a rank is an error that it meets: the words stand where a line begins, or after those of an
error.
"""

from orchestrator.diagnosis.logs.patterns import Text, compiled

ERROR = (
    r"(error|exception|failure|failed|fault|contained)\b|\b(ERROR|FATAL ERROR|CRITICAL|WARN)\b"
    r"|fatal: |what\(\): |\bstderr: |^[EF]\d{4} ",
)
"""What stands before the words of a failure in the line that reports it …"""
OTHERS = (
    r"\b(previous(ly)?|prior|earlier|last|resumed|restart(s|ed|able)?|retr(y|ies|yable)|history)\b",
    r"\b(excluded?|skip(s|ped)?|ignor\w+|known|expected|simulat\w+|inject\w+)\b",
    r"\b(rules?|patterns?|polic\w+|config\w*|options?|args)\b",
    r"\b(prompt|question|answer|sample|example|text|input|label|decoded)\b",
    r"^\W*[qa][:.] |^\s*[-*] ",
)
"""… unless it is of other times, of other hosts, of what a program looks for or reads, …"""
IN_GENERAL = (
    r"\b(if|when(ever)?|in case|unless|such as|e\.g\.|for example|scenarios?|means|explains)\b",
    r"\b(describes?|handles|addresses|treats?|documentation|changelog|release notes)\b",
    r"\b(checks?|looks?|watch(es)?|scans?|tests?) for\b|\bwhat should\b|\bhow (do|to|can)\b",
    r"\blast (week|month|year)\b",
)
"""… or of no time at all."""
PROGRAM = (
    r"^\W*([\d.]+\W+)?(\w{3} +\d+ [\d:]+ \S+ )?([\w.-]+(\[\d+\])?: ?)?([\w.-]+: ?)?\W*(\w+\.)*\z",
)
"""A kernel, a program that says its name, or a module that an exception is of."""
QUOTED = (r"""(^|[^\w)])['"`][^'"`]*\z""",)
"""The line is within a quotation …"""
REPEATED = (
    r"""((Error|Exception)\(|(failure|error) (\d+ )?|call=)['"`][^'"`]*\z""",
    r"""["'](level|severity|levelname|lvl)["']\s*:\s*["'](error|fatal|critical)""",
    r"""["'](error|exception|exc_info|failure)["']\s*:\s*["'][^'"`]*\z""",
)
"""… which is that of an error, or of a line of a log in JSON that reports one."""


def without_mentions(text: Text, patterns: tuple[str, ...]) -> Text:
    """Without the lines that have one of the patterns and report nothing."""
    mentions = {n for n in text.numbers(patterns) if not _reports(text.line(n), patterns)}
    return text.without(mentions) if mentions else text


def _reports(line: bytes, patterns: tuple[str, ...]) -> bool:
    found = compiled(patterns).search(line)
    before = line[: found.start()] if found else line
    if _has(QUOTED, before) and not _has(REPEATED, before):
        return False
    error = compiled(ERROR).search(before)
    if _has(OTHERS, before[: error.start()] if error else before):
        return False
    return bool(error) or (_has(PROGRAM, before) and not _has(IN_GENERAL, line))


def _has(patterns: tuple[str, ...], said: bytes) -> bool:
    return compiled(patterns).search(said) is not None
