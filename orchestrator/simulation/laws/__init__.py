"""The laws that every simulated history is checked against."""
