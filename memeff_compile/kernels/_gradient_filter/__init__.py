"""Loops over blocks of rows (tokens) that leave unlikely classes out of a loss's gradients.

Three gradient filters choose these classes: `published`, the filter of the Cut Cross-Entropy paper
(arXiv 2411.09009, section 4.3), and this package's filters `mass` and `block`. If a call of the op
`linear_cross_entropy` requests a filter, the op's implementation imports this folder, and uses the
folder's loops instead of its own loops. The module `levels` says in which calls the filters drop
classes, and the module `shapes` contains the sizes of tiles and launches. Losses and bias gradients
are exact with every filter.
"""
