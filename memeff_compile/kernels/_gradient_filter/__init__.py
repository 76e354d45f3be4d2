"""Loops over blocks of rows that drop unlikely classes from a loss's gradients: the published
filter, and two others.

The filter of the Cut Cross-Entropy paper (arXiv 2411.09009, section 4.3) and the filters `mass` and
`block` replace the loops of an implementation of `linear_cross_entropy`, which imports them when a
call requests a filter. `levels` says in which calls the filters drop classes, and `shapes` contains
their sizes. Losses and bias gradients are exact with every filter.
"""
