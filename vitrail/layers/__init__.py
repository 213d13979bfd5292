"""Layers: modules that models are made of, each over packed tokens `[T, channels]`. Own parameters
(built on the meta device, filled by `weights.load`) and the order of ops; which part of a
checkpoint fills a parameter, and how it is cut over ranks, is declared by the model's weight map.
Refuse to know architectures, requests and files."""
