"""Sampling algorithms for many chains at once."""
