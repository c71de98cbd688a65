"""What is installed, and what works with less."""
