"""Engines of a pointwise function over whole arrays."""
