"""Weights: from a checkpoint's names and bytes to a model's parameters. Owns the declared map
between the two, the strict reading of safetensors and GGUF headers, the plan that consumes every
tensor and fills every parameter exactly once, its execution, and the writing of small checkpoints
through the same map. Refuses to know what a parameter is for, and opens nothing but safetensors
files, their index and GGUF files."""
