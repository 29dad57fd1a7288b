"""Engines of attention, forward and backward."""
