"""The backward pass: its knobs, and its launches."""
