"""Studies of the paper on block-operations."""
