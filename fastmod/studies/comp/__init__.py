"""Compositional models, whose layers are mixtures of templates: single, multiple and new tasks, new domains."""
