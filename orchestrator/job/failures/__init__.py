"""What a failure means and what follows from it: verdicts, rollback, another plan. Pure."""
