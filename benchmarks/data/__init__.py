"""Makes text and pictures to train on."""
