"""KV caches as objects, and their effects on a model."""
