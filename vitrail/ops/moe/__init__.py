"""Mixture of experts: the router's choice and the experts' products. Knows no shared experts: they
are a layer's gated MLP."""
