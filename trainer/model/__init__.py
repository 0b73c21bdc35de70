"""The model: building it from transformers, its pipeline stages, its weights and adapters."""
