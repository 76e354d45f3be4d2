"""One op at a time: errors, memory, time."""
