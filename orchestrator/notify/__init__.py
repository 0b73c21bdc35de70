"""Messages to people about incidents and ends of a job: Slack, webhooks, mail, commands."""
