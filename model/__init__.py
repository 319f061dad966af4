"""The decoder-only language model and its file format."""
