"""Plans, places, launches and supervises n-dimensional parallel training jobs. Never imports torch."""
