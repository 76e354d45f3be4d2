"""Device code and device facts shared by several ops. No module here imports triton when it is
imported itself.
"""
