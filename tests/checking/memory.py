"""Tests that take more memory than most devices have."""

import jax
import pytest

from checking.compare import platform


def needs_memory(gib: int) -> pytest.MarkDecorator:
    """Skips a test where no GPU has so many GiB of free memory."""
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    return pytest.mark.skipif(
        platform() != "cuda" or free < gib * 2**30, reason=f"takes a GPU with {gib} GiB of free memory"
    )
