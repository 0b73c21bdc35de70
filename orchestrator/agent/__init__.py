"""The agent that runs on every host of a job: it starts and stops ranks and reports on them."""
