"""Data that are made rather than read; readers of data sets are in ``fastmod.data``."""
