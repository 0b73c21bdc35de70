"""The corpus is valid, and each column of the benchmark counts what it should."""

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import yaml
from msgspec.structs import replace

from benchmarks.corpus import __main__ as command
from benchmarks.corpus.cases import (
    CORPUS,
    HALF_KEPT,
    ROUNDS,
    Case,
    DumpCase,
    is_kept,
    part_of,
    read_cases,
    read_dump_cases,
)
from benchmarks.corpus.report import kept_half, misses, passes, report
from benchmarks.corpus.score import (
    Grade,
    Outcome,
    dump_outcome,
    grade,
    outcome,
    run_cases,
    run_dump_cases,
)
from orchestrator.app.classification import Classification
from orchestrator.contract.spec.failures import Scope
from orchestrator.diagnosis.hang.verdicts import Diagnosis
from orchestrator.errors import JobError

PARTS = ("development", "heldout")
CASES = [case for part in PARTS for case in read_cases(part)]
DUMPS = [case for part in PARTS for case in read_dump_cases(part)]
LATER = list(read_cases(ROUNDS))
ALL: list[Case | DumpCase] = [*CASES, *LATER, *DUMPS]
KEYS = {"name", "source", "about", "log", "kernel", "exit_code", "signal", "accepts", "generic"}
KEYS |= {"scope", "excludes_host"}
NEEDED = {"name", "source", "about", "accepts", "scope", "excludes_host"}
LEAST = 300
LEAST_DUMPS = 12
LEAST_OF_A_ROUND = 30


def test_there_are_as_many_cases_as_documented() -> None:
    assert len(CASES) >= LEAST
    assert len(DUMPS) >= LEAST_DUMPS


def test_each_case_has_the_keys_of_a_case_and_no_others() -> None:
    for path in [path for part in (*PARTS, ROUNDS) for path in CORPUS.glob(f"{part}/*.yaml")]:
        for fields in yaml.load(path.read_text(), yaml.CSafeLoader)["cases"]:
            assert fields.keys() >= NEEDED, (path, fields.get("name"))
            assert fields.keys() <= KEYS, (path, fields["name"])


def test_names_are_unique_and_in_kebab_case() -> None:
    names = [case.name for case in ALL]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert [name for name in names if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)] == []


def test_each_case_says_where_it_comes_from_and_what_happened() -> None:
    for case in ALL:
        assert re.match(r"https?://\w", case.source), case.name
        assert case.about.strip(), case.name


def test_each_case_has_evidence_and_a_label() -> None:
    scopes = set(get_args(Scope))
    for case in [*CASES, *LATER]:
        assert case.log or case.kernel or case.signal or case.exit_code, case.name
        assert case.accepts, case.name
        assert scopes.issuperset(case.scopes), case.name
        assert case.excludes_host in {True, False, "either"}, case.name


def test_the_name_of_a_case_decides_whether_it_is_held_out() -> None:
    for part in PARTS:
        assert [case.name for case in read_cases(part) if part_of(case.name) != part] == []
    share = sum(part_of(case.name) == "heldout" for case in CASES) / len(CASES)
    assert 0.15 < share < 0.25


def test_each_round_has_cases_of_its_own_and_is_read_in_order() -> None:
    files = [case.file for case in LATER]
    numbers = [int(Path(file).stem) for file in dict.fromkeys(files)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert min(Counter(files).values()) >= LEAST_OF_A_ROUND
    for case in LATER:
        assert case.name.startswith(f"r{Path(case.file).stem}-"), case.name


def test_each_folder_of_dumps_has_a_case() -> None:
    folders = {path.name for path in (CORPUS / "dumps").iterdir() if path.is_dir()}
    assert folders == {case.name for case in DUMPS}


CASE = Case(
    name="a",
    source="https://example.org",
    about="A GPU was lost.",
    accepts=("gpu-lost", "xid-79-*"),
    generic=("abort",),
    scopes=("host",),
    excludes_host=True,
    log="",
    kernel="",
    exit_code=1,
    signal=None,
    file="development/a.yaml",
)
FOUND = Classification(
    class_="gpu-lost",
    scope="host",
    action="replace",
    excludes_host=True,
    line="NVRM",
    pattern="NVRM",
    advice="",
)
NOTHING = Classification(
    class_=None,
    scope=None,
    action=None,
    excludes_host=False,
    line=None,
    pattern=None,
    advice=None,
)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (FOUND, Grade.RIGHT),
        (replace(FOUND, class_="xid-79-off-the-bus"), Grade.RIGHT),
        (replace(FOUND, scope="user"), Grade.WRONG),
        (replace(FOUND, class_="abort", scope="rank"), Grade.GENERIC),
        (replace(FOUND, class_="disk-full"), Grade.WRONG),
        (NOTHING, Grade.WRONG),
    ],
)
def test_a_class_is_right_if_its_name_and_scope_are(found: Classification, expected: Grade) -> None:
    assert grade(CASE, found) is expected


def test_no_known_class_is_right_if_a_case_accepts_unknown() -> None:
    assert grade(dataclasses.replace(CASE, accepts=("unknown",)), NOTHING) is Grade.RIGHT


def test_a_kept_broken_host_is_missed_and_an_excluded_healthy_one_counted() -> None:
    assert outcome(CASE, replace(FOUND, excludes_host=False)).missed
    assert not outcome(CASE, FOUND).missed
    healthy = dataclasses.replace(CASE, excludes_host=False)
    assert outcome(healthy, FOUND).excluded
    assert not outcome(healthy, replace(FOUND, excludes_host=False)).excluded


def test_a_host_on_which_operators_differ_counts_in_no_column() -> None:
    doubtful = outcome(dataclasses.replace(CASE, excludes_host="either"), FOUND)
    columns = (doubtful.missed, doubtful.excluded, doubtful.broken, doubtful.healthy)
    assert columns == (False, False, False, False)


DUMP = DumpCase(
    name="d",
    source="https://example.org",
    about="Rank 2 does not call.",
    culprits=frozenset({2}),
    kinds=("never-entered",),
    or_none=False,
    folder=CORPUS,
)
VERDICT = Diagnosis(
    kind="never-entered", scope=None, ranks=(2,), hosts=(), confidence=0.9, cause=""
)


def test_naming_a_healthy_rank_is_the_worst_outcome_of_a_dump() -> None:
    assert dump_outcome(DUMP, VERDICT).grade is Grade.RIGHT
    nobody = dump_outcome(DUMP, replace(VERDICT, kind="not-known", ranks=()))
    assert nobody.grade is Grade.GENERIC
    assert not nobody.excluded
    wrong = dump_outcome(DUMP, replace(VERDICT, ranks=(2, 3)))
    assert wrong.grade is Grade.WRONG
    assert wrong.excluded


def test_naming_no_culprit_is_right_if_the_evidence_is_thin() -> None:
    thin = dataclasses.replace(DUMP, or_none=True, kinds=("not-known",))
    found = replace(VERDICT, kind="not-known", ranks=())
    assert dump_outcome(thin, found).grade is Grade.RIGHT


def test_a_refused_folder_is_wrong_and_names_no_culprit() -> None:
    refused = dump_outcome(DUMP, JobError("holds no dump", fix="name the folder"))
    assert (refused.grade, refused.excluded) == (Grade.WRONG, False)


def test_dumps_are_judged_by_what_diagnose_does() -> None:
    chosen = [case for case in DUMPS if case.name in {"absent-nccl", "mismatch-op-nccl"}]
    assert [one.grade for one in run_dump_cases(chosen)] == [Grade.RIGHT, Grade.RIGHT]


def outcomes(right: int, wrong: int = 0, missed: int = 0, excluded: int = 0) -> list[Outcome]:
    one = Outcome(name="a", file="f", grade=Grade.RIGHT, expected="", got="", broken=True)
    return [
        *[one] * (right - missed - excluded),
        *[dataclasses.replace(one, grade=Grade.WRONG, name="w")] * wrong,
        *[dataclasses.replace(one, missed=True, name="m")] * missed,
        *[dataclasses.replace(one, broken=False, healthy=True, excluded=True, name="e")] * excluded,
    ]


def test_each_limit_can_fail_alone() -> None:
    assert passes(outcomes(95, wrong=5))
    assert not passes(outcomes(94, wrong=6))
    assert passes(outcomes(100, missed=2))
    assert not passes(outcomes(100, missed=3))
    assert not passes(outcomes(100, excluded=1))


def test_the_rules_are_within_the_limits_on_the_cases_for_development() -> None:
    assert passes(run_cases(read_cases("development")))


def test_the_rules_are_within_the_limits_on_the_rounds() -> None:
    assert passes(run_cases(LATER))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus with one case in each part. All cases are graded right."""
    case = {
        "name": "a",
        "source": "https://example.org",
        "about": "A name is wrong.",
        "log": "Traceback (most recent call last):\nNameError: name 'x' is not defined\n",
        "exit_code": 1,
        "accepts": ["python-exception"],
        "scope": "user",
        "excludes_host": False,
    }
    for file in ("development/a.yaml", f"{ROUNDS}/1.yaml", f"{ROUNDS}/2.yaml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(yaml.safe_dump({"cases": [case]}))
    monkeypatch.setattr(command, "read_cases", lambda part: read_cases(part, root=tmp_path))
    monkeypatch.setattr(command, "read_dump_cases", lambda part: ())
    return tmp_path


@pytest.mark.parametrize("part", ["development/a.yaml", f"{ROUNDS}/2.yaml"])
def test_the_exit_code_says_whether_the_limits_hold(
    small: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([]) == 0
    assert "FAIL" not in capsys.readouterr().out
    (small / part).write_text((small / part).read_text().replace("python-exception", "disk-full"))
    assert command.main(["--misses"]) == 1
    shown = capsys.readouterr().out
    assert f"{part} a: wrong" in shown
    assert shown.count("FAIL") == 1


def test_the_report_counts_each_column() -> None:
    lines = list(report("logs", outcomes(97, wrong=3, missed=2)))
    assert lines[0] == "logs: 100 cases"
    assert [line.split("   limit")[0].strip() for line in lines[1:-1]] == [
        "right                    97 of  100  97.0%",
        "generic                   0 of  100   0.0%",
        "wrong                     3 of  100   3.0%",
        "broken host missed        2 of  100   2.0%",
        "healthy host excluded     0 of    0      -",
    ]
    assert lines[-1].strip() == "pass"


def test_a_miss_is_listed_also_where_only_the_host_is_wrong() -> None:
    listed = "\n".join(misses(outcomes(10, wrong=1, missed=1)))
    assert "f w: wrong" in listed
    assert "f m: right MISSED" in listed
    assert "f a:" not in listed


def test_misses_of_a_kept_half_are_counted_but_never_listed() -> None:
    wrong = [
        Outcome(name=f"r16-{n}", file=HALF_KEPT[-1], grade=Grade.WRONG, expected="", got="")
        for n in range(20)
    ]
    kept = [one for one in wrong if is_kept(one.name, one.file)]
    assert 0 < len(kept) < len(wrong)
    listed = "\n".join(misses(wrong))
    assert [one.name for one in wrong if f" {one.name}:" in listed] == [
        one.name for one in wrong if one not in kept
    ]
    assert f"0 of {len(kept)} right, 0 generic, {len(kept)} wrong" in kept_half(wrong)


def test_misses_of_held_out_cases_need_their_own_flag(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--heldout", "--misses"])
    assert "--heldout-misses" in capsys.readouterr().err
