"""A disk that takes no more: really full, and full at one write of a save after the other."""

FAULTS = {}
