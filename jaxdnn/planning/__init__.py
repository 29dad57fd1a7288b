"""Which engine serves a call, with which knobs, and how to see it."""
