"""Modules shared by the ops that fuse an output projection (lm_head) with a loss.

Each loss op has its own folder next to this one. An op's implementations compute a call block by
block (`walks`), and leave out rows with an ignored target (`rows`). `call` defines the arguments
and results of a call, and `ranks` the exchange of statistics if ranks split the classes. If an op's
forward pass also computes gradients, the backward pass multiplies them by the gradient of the loss
(`scaling`). `shapes` contains all sizes for these steps.
"""
