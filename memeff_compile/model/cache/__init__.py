"""KV caches as objects, and functions that make a model use these caches."""
