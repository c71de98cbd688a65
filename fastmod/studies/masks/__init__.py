"""Studies of the paper on weight masks."""
