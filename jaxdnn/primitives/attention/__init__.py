"""Attention: its meaning in plain JAX, its masks, and its public functions."""
