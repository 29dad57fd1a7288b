"""What the ops mean: one file an op, and the machinery that makes primitives of it."""
