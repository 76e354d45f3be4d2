"""Several processes under torchrun, each with a GPU."""
