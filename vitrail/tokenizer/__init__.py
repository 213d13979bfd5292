"""Text and token ids, both ways: tokenizers, chat templates, incremental detokenisation, stop
strings. Owns which text may become a special token. Refuses to know tensors, pixels, requests, and
how many tokens an image expands to."""
