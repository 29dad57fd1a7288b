"""Random calls and functions, and what they should return, with bounds on rounding errors."""
