"""The models we serve, one module or folder each: config reader, weight map, forward pass,
processor. `registry` maps architecture names to module *names* and imports nothing. Refuses to know
requests, scheduling and sampling."""
