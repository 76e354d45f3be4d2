"""Loops over blocks of rows (tokens) that leave unlikely classes out of a loss's gradients.

Three gradient filters choose these classes: `published`, the filter of the Cut Cross-Entropy paper
(arXiv 2411.09009, section 4.3), and this package's filters `mass` and `block`. The loops in this
folder replace the loops of an implementation of the op `linear_cross_entropy`, which imports this
folder only when a call requests a filter. The module `levels` says in which calls the filters drop
classes, and the module `shapes` contains the sizes of tiles and launches. Losses and bias gradients
are exact with every filter.
"""
