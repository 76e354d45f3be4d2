"""KV caches as objects, and what they do to a model."""
