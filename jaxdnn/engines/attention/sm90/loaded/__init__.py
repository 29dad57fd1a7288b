"""Gradients of what scores load, on Hopper."""
