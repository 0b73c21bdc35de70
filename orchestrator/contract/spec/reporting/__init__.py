"""What a job tells people and programs outside: pages, metrics, notifications."""
