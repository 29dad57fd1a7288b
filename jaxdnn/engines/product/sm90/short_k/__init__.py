"""Products over a short K."""
