"""Walks that drop unlikely classes from a loss's gradients: the published filter, and two others.

The filter of the Cut Cross-Entropy paper (arXiv 2411.09009, section 4.3) and the filters `mass` and
`block` are walks like those of an engine of `linear_cross_entropy`, which loads them when a call
asks for one. `levels` says in which calls they drop classes, and `shapes` has their sizes. Losses
and bias gradients are exact under every filter.
"""
