"""Deferred logits: tensors whose values are computed when code first reads them."""
