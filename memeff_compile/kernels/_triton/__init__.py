"""Device functions and GPU properties that several ops share. Importing a module of this package
does not import triton.
"""
