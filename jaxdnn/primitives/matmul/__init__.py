"""Products of matrices: `matmul`, `dot_general` and `gated_linear_unit`."""
