"""The samplers: what moves many chains at once."""
