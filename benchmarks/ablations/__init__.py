"""The worth of each part of a method."""
