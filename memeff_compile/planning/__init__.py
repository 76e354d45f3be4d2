"""Predict the memory of a training step from the step's graphs, without running the step.

Users call `memeff_compile.explain`. These modules do the work:

- `capture` traces a model on fake tensors as the backend would, with and without the passes.
- `timeline` predicts which buffers of a captured graph exist at each time.
- `footprint` computes from these buffers the memory of a training step, as formulas in batch size
  and length.
- `setting` applies these formulas to a training setting (optimizer, number of GPUs), and finds the
  largest batch that fits into a given memory.
"""
