"""The cache: which page holds which tokens (host, ints), and the device memory behind (`*_pool`).

Owns pages, the tree of shared prefixes, encoder entries and their byte budgets. Refuses to know
requests' text, sampling and models: it sees keys, counts and specs."""
