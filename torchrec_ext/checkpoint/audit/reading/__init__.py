"""Reads checkpoints of any kind, entry by entry and piece by piece, without running what is in them."""
