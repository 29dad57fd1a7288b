"""Gradients of head sizes above 128: two kernels, one with tiles of queries and one with tiles of keys."""
