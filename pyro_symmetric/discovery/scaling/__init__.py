"""Scales and signs by rules: equations between multipliers, operator by operator."""
