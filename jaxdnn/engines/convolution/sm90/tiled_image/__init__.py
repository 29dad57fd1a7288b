"""Gradients of images that windows tile, on Hopper's tensor cores."""
