"""Any GPU, any convolution: a product of matrices for each group, whose elements are gathered."""
