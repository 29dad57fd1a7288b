"""Convolutions of images with few channels on Hopper's tensor cores."""
