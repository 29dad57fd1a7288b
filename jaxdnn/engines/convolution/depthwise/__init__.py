"""Depthwise convolutions on the tensor cores: rows of images times the bands of a window's rows."""
