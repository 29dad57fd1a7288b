"""Convolutions on Hopper's tensor cores."""
