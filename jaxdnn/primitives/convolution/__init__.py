"""Convolutions: their meaning in plain JAX, their public functions, and those made of them."""
