"""The OpenAI-compatible frontend: a plain ASGI callable in a process without torch. Owns HTTP,
JSON, SSE, metrics and the mapping of findings to status codes. Refuses to know the engine's inside:
requests go in and outputs come out through `engine.client`."""
