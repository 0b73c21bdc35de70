"""Documents, strings, docstrings and comments contain none of a short list of idioms.

The list is short: a pattern belongs here only if plain technical English never needs it.
CONTRIBUTING.md has the glossary with what to write instead.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import re2

ROOT = Path(__file__).parents[2]
IDIOMS = re2.compile(  # `re` takes 20 times as long for the same text
    "(?i)"
    + "|".join(
        [
            r"\banew\b",  # again
            r"\bmend(?:s|ed|ing)?\b",  # fix
            r"\b(?:comes|came|come) to (?:nothing|something|the same|train\b|less|more)",
            r"\bwhat (?:it|they|he|the \w+) (?:came|comes) to\b",  # the result
            r"\b(?:go|goes|went|going|gone) on from\b",  # resume from
            r", of (?:which|whom)\b",  # an inversion: "two hosts, of which one is lost"
            r"\bwhoever\b",  # a program is "it"
            r"\bnobody is (?:blamed|to blame)\b|\bblames? nobody\b",  # no culprit
            r"\bof (?:it|them|these|those) (?:there )?(?:is|are) none\b",  # there is no ...
            r"\bof old\b|\bthereupon\b|\bwhereupon\b|\bwherewith\b",
            r"\b(?:holds?|held) (?:it|them|a job|the job|others) up\b",  # blocks
            r"\bsent away\b|\bno good\b",  # replaced, excluded
            r"\bsure about \d",  # accuracy ±15 %
            r"\bdeal(?:s|t)? (?:it |them )?out\b",  # distributes
        ]
    )
)
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/results/*.md", "manifests/**/README.md")
    for path in ROOT.glob(pattern)
) + sorted(
    [*ROOT.glob("slurm/**/README.md"), *ROOT.glob("examples/*.*"), ROOT / "corpus/README.md"]
)
CODE = ("orchestrator", "trainer", "benchmarks", "tests", "slurm", "manifests", "examples")
"""Folders whose Python files are checked too."""
SHOWN = 20


def lines_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """Strings, docstrings and comments, each with the number of its first line."""
    with tokenize.open(path) as file:
        source = file.read()
    parts = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in parts:
            yield token.start[0], token.string


def found_in(path: Path) -> list[str]:
    """Place and idiom. A match may include a line break. The glossary may name banned idioms."""
    place, text = path.relative_to(ROOT), path.read_text()
    if path.suffix == ".py":
        # Tokens are needed only to tell strings and comments from code.
        pieces = list(lines_of_code(path)) if IDIOMS.search(re.sub(r"\s", " ", text)) else []
    else:
        if path.name == "CONTRIBUTING.md":
            text = text.partition("## Plain English")[0]
        pieces = [(1, text)]
    found = []
    for first, text in pieces:
        flat = re.sub(r"\s", " ", text)  # same length, so positions still count lines
        for match in IDIOMS.finditer(flat):
            line = first + text.count("\n", 0, match.start())
            found.append(f"{place}:{line}: {match[0]!r}")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_are_free_of_idioms(path: Path) -> None:
    found = found_in(path)
    assert not found, "\n".join(found[:SHOWN])


@pytest.mark.parametrize("folder", CODE)
def test_code_is_free_of_idioms(folder: str) -> None:
    own = Path(__file__)
    pattern = folder if folder.endswith(".py") else f"{folder}/**/*.py"
    paths = [path for path in sorted(ROOT.glob(pattern)) if path != own]
    found = [one for path in paths for one in found_in(path)]
    assert not found, f"{len(found)} idioms\n" + "\n".join(found[:SHOWN])


@pytest.mark.parametrize(
    "sentence",
    [
        "what the journal came to could not be written",
        "the pod is made anew",
        "once it is mended",
        "goes on from\nthe beginning",
        "nobody is blamed",
        "two hosts, of which one is lost",
    ],
)
def test_the_list_finds_the_idioms_of_the_glossary(sentence: str) -> None:
    assert IDIOMS.search(re.sub(r"\s", " ", sentence))


@pytest.mark.parametrize(
    "sentence",
    [
        "starts again on the same hosts",
        "resumes from step 20",
        "no culprit is known",
        "The default is none.",
        "two keys, one of which has a default",
    ],
)
def test_plain_sentences_are_accepted(sentence: str) -> None:
    assert not IDIOMS.search(sentence)
