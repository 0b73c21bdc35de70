"""What every host of a job does: it runs attempts as the leader orders, and reports on them."""
