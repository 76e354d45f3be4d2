"""Device code and device facts shared by several ops. Nothing here imports triton on its own."""
