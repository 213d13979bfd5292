"""Device bodies of attention, and nothing else: they know addresses and tiles. What is legal, who
allocates and how many programs there are is decided by the plan and by `backends/`."""
