"""Depthwise convolutions of short windows by whole lines of images, with ordinary arithmetic: bound by memory."""
