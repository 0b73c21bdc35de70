"""The pure state machine of one job: `step(run, event) -> (run, actions)` and its parts."""
