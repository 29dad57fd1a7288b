"""What every product with an epilogue shares: the epilogue, its derivative, dtypes, aliases."""
