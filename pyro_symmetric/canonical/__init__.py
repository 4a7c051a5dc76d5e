"""Canonical forms: one representative per orbit."""
