"""Layers and optimisers."""
