"""Choosing a token a row of logits: the likeliest, or by a draw that comes from outside. Knows rows
and their parameters; no requests, no random state."""
