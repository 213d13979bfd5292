"""Post-processors of tokenizer.json, for tests."""


def begins_with(literal: str, ends: str | None = None) -> dict:
    """The post-processor of Llama 3's kind."""
    names = [literal, None, *([ends] if ends else [])]
    pieces = [
        {"SpecialToken": {"id": n, "type_id": 0}} if n else {"Sequence": {"id": "A", "type_id": 0}}
        for n in names
    ]
    ids = {"[BOS]": 423, "[EOS]": 424, "the": 300}
    tokens = {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in names if n}
    template = {"type": "TemplateProcessing", "single": pieces, "pair": pieces}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    return {"type": "Sequence", "processors": [level, template | {"special_tokens": tokens}]}
