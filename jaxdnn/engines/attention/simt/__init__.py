"""Attention on any GPU, by ordinary arithmetic."""
