"""Compositional models: layers that are mixtures of templates, for one task, several, new ones and new domains."""
