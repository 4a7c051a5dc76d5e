"""From a network to its symmetry: traced, labelled, solved, explained, verified."""
