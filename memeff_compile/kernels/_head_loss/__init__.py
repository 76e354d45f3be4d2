"""Modules shared by the ops that fuse an output projection (lm_head) with a loss.

Each loss op has its own folder next to this one. An op's implementations compute a call block by
block (module `walks`), and leave out rows (tokens) with an ignored target (module `rows`). The
module `call` defines the arguments and results of a call. The module `ranks` exchanges statistics
between ranks that split the classes. If an op's forward pass also computes the operands' gradients,
the backward pass only multiplies them by a number (module `scaling`). This number is the gradient
that the backward pass receives for the loss. The module `shapes` contains sizes that all losses
share, such as how many elements a program reads at a time.
"""
