"""Predict the memory of a training step from its graphs, without running it.

`capture` traces a model on fake tensors as the backend would, with and without the passes;
`timeline` follows the buffers of a captured graph through a step; `footprint` turns both into
formulas in batch and length; `setting` computes the setting that fits a given memory. Users call
`memeff_compile.explain`.
"""
