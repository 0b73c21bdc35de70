"""The model: which transformers model, its stages, its first weights, its way in and out."""
