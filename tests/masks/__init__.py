"""Masks over whole models."""
