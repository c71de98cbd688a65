"""Ops over every backend: values, gradients, contracts."""
