"""Any GPU, any layout, exact arithmetic."""
