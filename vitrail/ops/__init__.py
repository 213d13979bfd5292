"""Kernels other than attention, one folder an op: `naive.py` is the definition in plain torch and
runs anywhere; kernels beside it are tested against it. Owns arithmetic on tensors it is given.
Refuses to know layers, models and requests; imports nothing here."""
