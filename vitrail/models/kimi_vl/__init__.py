"""Kimi-VL (A3B Instruct, Thinking, Thinking-2506): MoonViT, a two-layer projector and a
DeepSeek-V3-style decoder.

Owns what is true of this family alone: its config keys, tensor names, image rule and how the parts
are joined. `processor` imports no torch. Refuses to know requests, caches and other families."""
