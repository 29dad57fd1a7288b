"""Engines: each serves calls of one op on one platform; table.py has them in order."""
