"""Plans, places, launches and supervises n-dimensional parallel training jobs, without torch."""
