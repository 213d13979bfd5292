"""Facts and choices: frozen values read once, used everywhere. Owns the model's, the engine's and
the hardware's configuration and the `Finding`. Knows nothing of tensors, files' contents beyond
JSON, or any other room; imports the standard library alone."""
