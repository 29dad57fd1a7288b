"""Engines: each serves calls of one op on one platform, the last one any call; table.py has them in order."""
