"""Root-mean-square norm, alone and fused with the residual addition before it. Knows no layer."""
