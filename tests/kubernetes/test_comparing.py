"""How a recording is held against a trace, which is made of several."""

from tests.kubernetes.traces import SEEN, Step, differences, merged

SAID, TOLD = SEEN


def step(made: list[str], *said: str, active: int = 2) -> Step:
    return {"act": "made", "pods made": made, "job": {"active": active}, SAID: [*said], TOLD: []}


TRACE = merged([[step(["a"], "Created", "Running")], [step(["b"], "Created", "Restarting")]])


def test_what_one_recording_had_is_no_difference() -> None:
    assert differences(TRACE, [step(["a"], "Created")]) == []
    assert differences(TRACE, [step(["b"], "Created", "Running", "Restarting")]) == []


def test_what_every_recording_had_must_be_there_and_what_none_had_must_not() -> None:
    assert differences(TRACE, [step(["a"], "Running", "Failed")]) == [
        f"made: {SAID}: without 'Created'",
        f"made: {SAID}: has 'Failed'",
    ]


def test_what_comes_of_an_act_is_what_came_of_it_in_one_recording() -> None:
    (line,) = differences(TRACE, [step(["c"], "Created")])
    assert line == "made: pods made:  is ['c'], recorded was ['a'] or  is ['c'], recorded was ['b']"
    (line,) = differences(TRACE, [step(["a"], "Created", active=3)])
    assert line == "made: job: .active is 3, recorded was 2"


def told(*events: str) -> Step:
    return {**step(["a"], "Created"), TOLD: [*events]}


def test_what_is_told_again_or_of_a_pod_that_another_deleted_may_be_missing() -> None:
    made, ended = "Normal Made: pod", "Normal ExitedWithCode: Pod: job-0 exited with code 1"
    first, second = merged([[told(made), told(made, ended)]])
    assert first[TOLD] == {"always": [made], "sometimes": []}
    assert second[TOLD] == {"always": [], "sometimes": [made, ended][::-1]}
    deleted = "Normal SuccessfulDeletePod: Deleted pod: job-0"
    (own,) = merged([[told(ended, deleted)]])
    assert own[TOLD]["always"] == [ended, deleted]


def test_recordings_that_agree_are_told_once() -> None:
    (same,) = merged([[step(["a"], "Created")], [step(["a"], "Created")]])
    assert same["pods made"] == [["a"]]
    assert same[SAID] == {"always": ["Created"], "sometimes": []}
