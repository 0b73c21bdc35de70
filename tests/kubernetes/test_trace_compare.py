"""How a recording is held against a trace, which is made of several."""

from tests.kubernetes.traces.compare import SEEN, Step, differences, merged

SAID, TOLD = SEEN


def step(made: list[str], *said: str, active: int = 2) -> Step:
    return {"act": "made", "pods made": made, "job": {"active": active}, SAID: [*said], TOLD: []}


TRACE = merged([[step(["a"], "Created", "Running")], [step(["b"], "Created", "Restarting")]])


def test_an_act_of_one_recording_is_no_difference() -> None:
    assert differences(TRACE, [step(["a"], "Created")]) == []
    assert differences(TRACE, [step(["b"], "Created", "Running", "Restarting")]) == []


def test_acts_of_all_recordings_are_required_and_unknown_acts_are_refused() -> None:
    assert differences(TRACE, [step(["a"], "Running", "Failed")]) == [
        f"made: {SAID}: without 'Created'",
        f"made: {SAID}: has 'Failed'",
    ]


def test_the_result_of_an_act_must_equal_that_of_one_recording() -> None:
    (line,) = differences(TRACE, [step(["c"], "Created")])
    assert line == "made: pods made:  is ['c'], recorded was ['a'] or  is ['c'], recorded was ['b']"
    (line,) = differences(TRACE, [step(["a"], "Created", active=3)])
    assert line == "made: job: .active is 3, recorded was 2"


def told(*events: str) -> Step:
    return {**step(["a"], "Created"), TOLD: [*events]}


def test_repeated_events_and_those_of_foreign_deletions_may_be_missing() -> None:
    made, ended = "Normal Made: pod", "Normal ExitedWithCode: Pod: job-0 exited with code 1"
    first, second = merged([[told(made), told(made, ended)]])
    assert first[TOLD] == {"always": [made], "sometimes": []}
    assert second[TOLD] == {"always": [], "sometimes": [made, ended][::-1]}
    deleted = "Normal SuccessfulDeletePod: Deleted pod: job-0"
    (own,) = merged([[told(ended, deleted)]])
    assert own[TOLD]["always"] == [ended, deleted]


def test_equal_recordings_are_shown_once() -> None:
    (same,) = merged([[step(["a"], "Created")], [step(["a"], "Created")]])
    assert same["pods made"] == [["a"]]
    assert same[SAID] == {"always": ["Created"], "sometimes": []}
