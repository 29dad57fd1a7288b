"""Convolution problems, run in numpy."""
