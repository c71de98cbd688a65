"""The engine of the studies, and what a run shows and leaves."""
