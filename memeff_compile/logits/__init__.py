"""Deferred logits: tensors that are computed when they are first read."""
