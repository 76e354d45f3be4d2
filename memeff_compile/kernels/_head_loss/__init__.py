"""Shared parts of the ops that fuse an output projection (lm_head) and a loss.

A loss op has its own folder next to this one. Its engines compute a call block by block (`walks`),
and leave rows with an ignored target out (`rows`). `call` defines the request and its results, and
`ranks` the exchange of statistics if the classes are split over ranks. An op whose forward pass
also computes gradients multiplies them by the gradient of the loss later (`scaling`). `shapes` has
every size of these steps.
"""
