"""Better fixes for mistakes of a spec, most of them names that a key has in another tool."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from orchestrator.contract.codec import UNKNOWN_KEY, Problem, nearest
from orchestrator.specs.other_names import AT, KEYS, SENTENCES
from orchestrator.specs.other_values import FEW, fix_of_value
from orchestrator.specs.slurm_options import fix_of_option

TYPO = 0.85
"""Words that are so similar differ in a letter or two."""


def advised(problems: Sequence[Problem]) -> list[Problem]:
    """The problems, with better fixes. A required key that is missing only because it is written
    wrongly is left out."""
    found = [_advised(problem) for problem in problems]
    meant = {path for one in found for path in _meant(one)}
    return [one for one in found if not (one.limit == "given" and one.path in meant)]


def _meant(problem: Problem) -> Iterator[str]:
    """The keys that a fix for an unknown key names."""
    if problem.words == UNKNOWN_KEY:
        yield from re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*", problem.fix.removeprefix("did you mean"))


def _advised(problem: Problem) -> Problem:
    if problem.words == UNKNOWN_KEY:
        return replace(problem, fix=_fix_of_key(problem))
    fix = fix_of_value(problem)
    return problem if fix is None else replace(problem, fix=fix)


def _fix_of_key(problem: Problem) -> str:
    from orchestrator.specs.keys import all_keys

    above, _, written = problem.path.rpartition(".")
    name = _plain(written)
    if problem.path in AT:
        return AT[problem.path]
    if (option := fix_of_option(problem.path, name)) is not None:
        return option
    every = [key.path for key in all_keys() if "[]" not in key.path]
    here = [path for path in every if path.rpartition(".")[0] == above]
    names = {path.rpartition(".")[2]: path for path in here}
    if (path := _beside(name, names)) is not None:
        return f"did you mean {path}?"
    if name in SENTENCES:
        return SENTENCES[name]
    if name in KEYS:
        return f"did you mean {KEYS[name]}?"
    elsewhere = [path for path in every if path.rpartition(".")[2] == name]
    near = nearest(name, names) or _part_of(name, names) or _one_letter_off(name, names)
    if near is not None and not elsewhere:
        return f"did you mean {names[near]}?"
    if elsewhere:
        return f"did you mean {' or '.join(sorted(elsewhere, key=len)[:2])}?"
    for known in difflib.get_close_matches(name, [*KEYS, *SENTENCES], n=1, cutoff=TYPO):
        return SENTENCES.get(known) or f"did you mean {KEYS[known]}?"
    if 0 < len(names) <= FEW:
        return f"remove it, or use one of {', '.join(names)}"
    return f"remove it; `ndctl explain{' ' if above else ''}{above}` lists the keys"


def _beside(name: str, names: Mapping[str, str]) -> str | None:
    """The key of the same mapping that was meant: `names` has the last words of its keys."""
    # The same key in another form, such as nodeSelector.
    if name in names:
        return names[name]
    # Another tool's name of a key that belongs here is no typo: gpus is gpus_per_host, not gpu.
    if KEYS.get(name) in names.values():
        return KEYS[name]
    # A typo: steps for step. It comes before the same word elsewhere (run.metrics.step).
    typo = difflib.get_close_matches(name, names, n=1, cutoff=TYPO)
    return names[typo[0]] if typo else None


def _part_of(name: str, names: Iterable[str]) -> str | None:
    """The name whose words are all in `name`, such as shm for shm_size."""
    words = set(name.split("_"))
    return next((one for one in names if words >= set(one.split("_"))), None)


def _one_letter_off(name: str, names: Iterable[str]) -> str | None:
    """The only name that differs in one letter, such as tp for tq."""
    found = [
        one
        for one in names
        if len(one) == len(name) and sum(a != b for a, b in zip(one, name, strict=True)) == 1
    ]
    return found[0] if len(found) == 1 else None


def keys_for_name(name: str) -> list[str]:
    """The keys that a name of another tool, or the last word of a key, stands for."""
    from orchestrator.specs.keys import all_keys

    plain = _plain(name)
    if plain in KEYS:
        return [KEYS[plain]]
    every = [key.path for key in all_keys() if "[]" not in key.path]
    return sorted((path for path in every if path.rpartition(".")[2] == plain), key=len)[:2]


def _plain(name: str) -> str:
    """`--nproc-per-node`, `nodeSelector` and `Learning_Rate` as keys are written here."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip().lstrip("-"))
    return snake.replace("-", "_").lower()
