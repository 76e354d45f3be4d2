"""Verbs on whole models: what `torch.compile` cannot do, as it must not free what the user owns.

A verb here changes a model, or makes an object for one, because the user called it by name. It may
use kernels; it knows nothing of graphs and passes, and passes know nothing of it.
"""
