"""Predict the memory of a training step from its graphs, without running it.

`capture` traces a model on fake tensors as the backend would, with and without the passes;
`timeline` follows the buffers of a captured graph through a training step; `footprint` turns both
into formulas in batch size and length; `setting` finds the setting that fits into a given memory.
Users call `memeff_compile.explain`.
"""
