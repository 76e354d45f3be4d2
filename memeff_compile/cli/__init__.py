"""The commands of `memeff`."""
