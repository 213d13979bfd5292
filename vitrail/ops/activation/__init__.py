"""Gated activations of the feed-forward layers, over [gate | up] rows. Knows no weights."""
