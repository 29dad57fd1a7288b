"""Pointwise functions, how to run what is made of them, and how far results may be off."""
