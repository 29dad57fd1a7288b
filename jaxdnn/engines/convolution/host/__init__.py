"""The CPU: products of gathered panels, and vectors of channels where a group has one."""
