"""A recording is compared with a trace that was merged from several recordings."""

from tests.kubernetes.traces.compare import SET_PARTS, Step, differences, merged

CONDITIONS, EVENTS = SET_PARTS


def step(made: list[str], *conditions: str, active: int = 2) -> Step:
    return {
        "action": "made",
        "pods made": made,
        "job": {"active": active},
        CONDITIONS: [*conditions],
        EVENTS: [],
    }


TRACE = merged([[step(["a"], "Created", "Running")], [step(["b"], "Created", "Restarting")]])


def test_the_result_of_any_one_recording_is_accepted() -> None:
    assert differences(TRACE, [step(["a"], "Created")]) == []
    assert differences(TRACE, [step(["b"], "Created", "Running", "Restarting")]) == []


def test_a_condition_of_all_recordings_is_required_and_an_unknown_one_is_refused() -> None:
    assert differences(TRACE, [step(["a"], "Running", "Failed")]) == [
        f"made: {CONDITIONS}: without 'Created'",
        f"made: {CONDITIONS}: has 'Failed'",
    ]


def test_other_results_must_equal_those_of_one_recording() -> None:
    (line,) = differences(TRACE, [step(["c"], "Created")])
    assert line == "made: pods made:  is ['c'], recorded was ['a'] or  is ['c'], recorded was ['b']"
    (line,) = differences(TRACE, [step(["a"], "Created", active=3)])
    assert line == "made: job: .active is 3, recorded was 2"


def step_with_events(*events: str) -> Step:
    return {**step(["a"], "Created"), EVENTS: [*events]}


def test_repeated_events_and_ends_of_pods_that_others_delete_may_be_missing() -> None:
    made, ended = "Normal Made: pod", "Normal ExitedWithCode: Pod: job-0 exited with code 1"
    first, second = merged([[step_with_events(made), step_with_events(made, ended)]])
    assert first[EVENTS] == {"always": [made], "sometimes": []}
    assert second[EVENTS] == {"always": [], "sometimes": [made, ended][::-1]}
    deleted = "Normal SuccessfulDeletePod: Deleted pod: job-0"
    (own,) = merged([[step_with_events(ended, deleted)]])
    assert own[EVENTS]["always"] == [ended, deleted]


def test_a_condition_that_an_event_shows_may_have_been_missed() -> None:
    text = "JobRestarting: job job is restarting because Master replica(s) failed."
    trace = merged([[step_with_events()], [step_with_events(f"Warning {text}")]])
    seen = {**step_with_events(), CONDITIONS: ["Created", f"Restarting True {text}"]}
    assert differences(trace, [seen]) == []
    without = merged([[step_with_events()]])
    assert differences(without, [seen]) == [f"made: {CONDITIONS}: has 'Restarting True {text}'"]


def test_equal_recordings_are_shown_once() -> None:
    (same,) = merged([[step(["a"], "Created")], [step(["a"], "Created")]])
    assert same["pods made"] == [["a"]]
    assert same[CONDITIONS] == {"always": ["Created"], "sometimes": []}
