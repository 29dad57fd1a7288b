"""The CPU: packed panels, tiles in cache."""
