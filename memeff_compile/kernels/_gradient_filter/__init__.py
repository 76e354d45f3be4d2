"""Loops over blocks of rows (tokens); the loops leave unlikely classes out of a loss's gradients.

Three gradient filters choose these classes. The filter `published` is from the Cut Cross-Entropy
paper (arXiv 2411.09009, section 4.3). `mass` and `block` are this package's filters. If a call of
the op `linear_cross_entropy` requests a filter, the op's implementation imports this folder. The
implementation then uses the folder's loops instead of its own loops. The module `levels` says in
which calls the filters drop classes, and `shapes` contains the sizes of tiles and launches. Losses
and bias gradients are exact with every filter.
"""
