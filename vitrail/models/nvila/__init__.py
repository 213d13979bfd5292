"""NVILA in both published generations: 8B (dynamic S2) and Lite.

Owns their facts: configuration, names of tensors, and the image rules. `processor` imports no
torch. Refuses to know scheduling, HTTP and files other than the checkpoint's."""
