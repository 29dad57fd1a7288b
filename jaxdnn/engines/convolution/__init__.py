"""Engines of convolutions, in all three directions; pointwise ones are products."""
