"""Device code and properties of GPUs that several ops share. Importing a module of this package
does not import triton.
"""
