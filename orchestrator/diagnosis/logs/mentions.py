"""Tells lines of a rank's log that report a failure from lines that only mention one. Pure.

A program that trains on public text prints words of kernels among its samples. A launcher prints
the failures that it looks for, and a check prints what it found on other hosts. A failure under a
rank is an error that the rank meets: its words stand at the beginning of a line, or after the words
of an error.
"""

from itertools import takewhile

from orchestrator.diagnosis.logs.patterns import Text, compiled

ERROR = (
    r"(error|exception|failure|failed|fault|contained)\b|\b(ERROR|FATAL ERROR|CRITICAL|WARN)\b"
    r"|fatal: |what\(\): |\bstderr: |^[EF]\d{4} ",
)
"""Words before the failure in a line that reports it."""
OTHERS = (
    r"\b(previous(ly)?|prior|earlier|last|resumed|restart(s|ed|able)?|retr(y|ies|yable)|history)\b",
    r"\b(excluded?|skip(s|ped)?|ignor\w+|known|expected|simulat\w+|inject\w+)\b",
    r"\b(rules?|patterns?|polic\w+|config\w*|options?|args)\b",
    r"\b(prompt|question|answer|sample|example|text|input|label|decoded)\b",
    r"^\W*[qa][:.] |^\s*[-*] ",
    r"^\s*([>│┃║]|\|[^|]*\||\d+[\t,]|</?(pre|code|p|td|li|think|answer)>)",
)
"""Words of a line that does not report: it is about other times, other hosts, or what a program
searches or reads."""
IN_GENERAL = (
    r"\b(if|when(ever)?|in case|unless|such as|e\.g\.|for example|scenarios?|means|explains)\b",
    r"\b(describes?|handles|addresses|treats?|documentation|changelog|release notes)\b",
    r"\b(checks?|looks?|watch(es)?|scans?|tests?) for\b|\bwhat should\b|\bhow (do|to|can)\b",
    r"\blast (week|month|year)\b",
)
"""Words of a line that is general: conditions, explanations, documentation, questions."""
PROGRAM = (
    r"^\W*([\d.]+\W+)?(\w{3} +\d+ [\d:]+ \S+ )?([\w.-]+(\[\d+\])?: ?)?([\w.-]+: ?)?\W*(\w+\.)*\z",
)
"""A kernel, a program that prints its name, or the module of an exception."""
QUOTED = (r"""(^|[^\w)])['"`][^'"`]*\z""",)
"""The line is inside a quotation."""
REPEATED = (
    r"""((Error|Exception)\(|(failure|error) (\d+ )?|call=)['"`][^'"`]*\z""",
    r"""["'](level|severity|levelname|lvl)["']\s*:\s*["'](error|fatal|critical)""",
    r"""["'](error|exception|exc_info|failure)["']\s*:\s*["'][^'"`]*\z""",
)
"""A quotation that reports: one in an error, or in a JSON log line about an error."""


FENCE = (r"^\s*(```|~~~)",)
"""Begins and ends a quotation in a text that a program prints."""
TURN = (r"<\|(im_start|start_header_id|user|assistant|system)\b|\[INST\]|<start_of_turn>",)
TURN_ENDS = (r"<\|(im_end|eot_id|end|endoftext)\|>|\[/INST\]|<end_of_turn>|</s>",)
"""Marks of a chat around what somebody says."""
SPEAKER = (
    r"^\W*(user|human|assistant|question|answer|prompt|completion|response|generated text)s?\s*:",
    r"^\s*\[(prompt|response|completion|question|answer)\]",
)
"""A heading of a sample: the lines below it belong to the sample."""
SAMPLE_ENDS = (r"^\s*$|^Traceback \(most recent|^\W*(step|iter(ation)?|epoch)\b\W*\d",)
MOST_OF_A_SAMPLE = 30
"""Lines below a heading that may belong to the sample."""


def without_mentions(text: Text, patterns: tuple[str, ...]) -> Text:
    """The text without lines that match a pattern but report nothing."""
    found = tuple(text.numbers(patterns))
    samples = _samples(text) if found else frozenset()
    mentions = {n for n in found if n in samples or not _reports(text.line(n), patterns)}
    return text.without(mentions) if mentions else text


def _samples(text: Text) -> frozenset[int]:
    """Lines of texts that a program prints: between fences, in a turn of a chat, or below a
    heading. A quotation without an end is none, because a log may be cut."""
    inside: set[int] = set()
    fences = list(text.numbers(FENCE))
    if len(fences) % 2:  # the log was cut inside of a sample, so any part may be one
        inside.update(range(fences[0], fences[-1]))
    for begin, end in zip(fences[::2], fences[1::2], strict=False):
        inside.update(range(begin, end))
    ends = list(text.numbers(TURN_ENDS))
    for begin in text.numbers(TURN):
        inside.update(range(begin, next((end for end in ends if end >= begin), begin)))
    stops = {*text.numbers(SAMPLE_ENDS), len(text.lines)}
    for begin in text.numbers(SPEAKER):
        below = range(begin + 1, begin + 1 + MOST_OF_A_SAMPLE)
        inside.update(takewhile(lambda n: n not in stops, below))
    return frozenset(inside)


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
