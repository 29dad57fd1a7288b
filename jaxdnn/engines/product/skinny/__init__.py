"""Few rows or columns on Hopper, at the speed of memory."""
