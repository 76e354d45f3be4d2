"""The commands of ``memeff``."""
