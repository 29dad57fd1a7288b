"""Normalization over axes of an array."""
