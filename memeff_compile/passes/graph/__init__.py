"""Code shared by all passes: it reads graphs, edits them, and runs the passes in order."""
