"""Engines of a `Product`: matrices that are multiplied, with an epilogue."""
