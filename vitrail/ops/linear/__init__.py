"""Products of a few rows with a large matrix, which are reads of that matrix, and what is fused in
front of them. Owns which way a product of some shape is computed. Knows no layer."""
