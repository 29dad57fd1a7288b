"""Filter gradients of convolutions of stride 1 on Hopper, whose blocks load the image once for all taps of a plane."""
