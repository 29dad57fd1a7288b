"""Convolutions of stride 1 on Hopper's tensor cores, whose tiles load the image once for all taps of a window."""
