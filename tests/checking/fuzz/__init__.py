"""Random calls and functions, and what they should return, with bounds on rounding errors."""

from checking.compiling import RIGHT, add_flags

add_flags(RIGHT)
