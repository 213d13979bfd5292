"""Attention: what a call site is (`shape`), how it will be run (`plan`), the numbers a batch brings
(`metadata`), and the backends that run it. Owns every attention call of the package, the encoders'
too. Refuses to know models, requests and the cache's bookkeeping: it sees page ids as tensors."""
