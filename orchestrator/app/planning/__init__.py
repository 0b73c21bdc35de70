"""Plans: from a spec before submission, and for fewer hosts or less memory while a job runs."""
