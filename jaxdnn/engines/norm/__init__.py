"""Engines of a normalization over rows."""
