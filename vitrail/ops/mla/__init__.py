"""What surrounds the attention of a latent-attention layer: its projected rows become queries and a
cache row; attended latents become values. Owns the order in which channels lie. Knows no layer and
no cache but the slots that it is given."""
