"""The studies themselves, and how others join."""
