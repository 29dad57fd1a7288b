"""Products of matrices as engines see them."""
