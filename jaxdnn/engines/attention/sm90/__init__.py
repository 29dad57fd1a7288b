"""Attention on Hopper's tensor cores."""
