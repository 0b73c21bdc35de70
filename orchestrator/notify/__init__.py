"""What a leader tells others about incidents and ends of a job: messages to people by Slack,
webhooks, mail and commands, and spans to a collector of OpenTelemetry."""
