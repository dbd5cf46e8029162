#!/usr/bin/env python3
"""Writes the small tokenizers of tests/data/tokenizer and the ids that the reference gives for them.

  tiny_qwen2.json, tiny_smollm.json   hand-made tokenizer.json files of the two kinds that Baton reads
  tiny_vectors.jsonl                  {"tokenizer", "text", "ids", "ids_literal", "pieces"}; pieces as bytes' lengths

The reference is the Rust `tokenizers` of Hugging Face. Run with:  pip install tokenizers==0.22.2
Usage: tests/golden/make_tokenizer_golden.py
"""

import json
import pathlib
import random

import tokenizers

OUT = pathlib.Path(__file__).resolve().parent.parent / "data/tokenizer"
QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Merged in this order; every right-hand side is two tokens that exist by then.
MERGES = """t h;th e;i n;e r;a n;Ġ t;Ġt he;o n;r e;Ġ a;Ġ s;h e;e n;Ġ w;o r;Ġ Ġ;ĠĠ ĠĠ;Ċ Ċ;ĠĠĠĠ ĠĠĠĠ;l l;l o;he llo;Ġw or;Ġwor ld;
l d;or ld;- >;) :;): Ċ;' s;' ll;d on;' t;a a;aa aa;aaaa aaaa;Ã ©;ä ¸;ä¸ ĸ;ç ķ;çķ Į;Ì ģ;Ġ Ã;0 0;1 0;' T;S T;ðŁ ĺ"""
ADDED = [("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<think>", False), ("</think>", False)]


def byte_alphabet() -> dict:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    table = {b: chr(b) for b in plain}
    table.update({b: chr(256 + i) for i, b in enumerate(others)})
    return table


def vocabulary(added_first: bool, drop: tuple) -> tuple:
    alphabet = byte_alphabet()
    order = [*range(33, 127), *range(161, 173), *range(174, 256), *range(0, 33), *range(127, 161), 173]
    tokens = [name for name, _ in ADDED] if added_first else []
    tokens += [alphabet[b] for b in order if b not in drop]
    merges = []
    for line in MERGES.replace("\n", "").split(";"):
        left, right = line.split(" ")
        if left not in tokens or right not in tokens:
            continue
        merges.append([left, right])
        if left + right not in tokens:
            tokens.append(left + right)
    if not added_first:
        tokens += [name for name, _ in ADDED]
    return {token: i for i, token in enumerate(tokens)}, merges


def tokenizer_json(kind: str) -> dict:
    smollm = kind == "smollm"
    vocab, merges = vocabulary(added_first=smollm, drop=(0xC0, 0xF1, 0x07) if smollm else ())
    added = [
        {"id": vocab[name], "content": name, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": special}
        for name, special in ADDED
    ]
    if not smollm:
        for name, _ in ADDED:
            del vocab[name]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": smollm, "use_regex": smollm}
    first = (
        {"type": "Digits", "individual_digits": True}
        if smollm
        else {"type": "Split", "pattern": {"Regex": QWEN2_REGEX}, "behavior": "Isolated", "invert": False}
    )
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None if smollm else {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [first, byte_level]},
        "post_processor": None if smollm else byte_level,
        "decoder": dict(byte_level, add_prefix_space=smollm, use_regex=True) if smollm else byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None if smollm else "",
            "end_of_word_suffix": None if smollm else "", "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": vocab,
            "merges": [" ".join(pair) for pair in merges] if smollm else merges,
        },
    }


FIXED = [
    "", " ", "  ", "a", "hello world", "the hello  world", "the  ", "don't", "CAN'T", "'STOP'", "!'s", " 's", "'\u017f",
    "2026", "a1b22 c333", " 5", "  5", "a  5 b", "\t5", "\n5", "\u00bd\u2163\uff19", "->", "(x):\n", "):\n\n", "\r\n\r\n x",
    " \n \n  x", "x \n", "\t\tx", "\u3000x", "\u00a0 x", "e\u0301", "\u00e9", "a\u0327\u0301", "a\u0301\u0327", "\u4e16\u754c\u4e16",
    "\ud55c\uae00", "\u1112\u1161\u11ab", "\U0001f600\U0001fae0", "\u0000\u0007", "\ufeff", "\u0085x", "\u200b",
    "<|im_start|>user\nhi<|im_end|>", "<think>e</think>\u0301", "<|im_start|<|im_end|>", "<<think>>", "aaaaaaaaaaaaaaaaa",
    "\u0915\u094d\u0937", "\u0e19\u0e49\u0e33", "\U000f0000", "it's we'll they'LL", "  \u0301", "100000", "\r", "\r\r\n\n",
]
ALPHABETS = [
    "ab 'sStTl\u017f\n", " \t\n\r\u3000\u0085x1", "the hello world 12 don't", "\u00e9e\u0301\u0327\u0308a\u1ea1\u0323 ",
    "\u4e16\u754c\u0915\u094d\ud55c\u1112\u1161\u11ab\u0e49 a", "<|im_start|>think/end aa", "->):(\n\r =+'\"!",
    "0a1\u00bd\uff19 \u2163x", "\U0001f600\U0001fae0\u200d\ufe0f a", "\u0000\u0007\u007f\u00a0\u2028 a",
]


def texts() -> list:
    rng = random.Random(20)
    result = list(FIXED)
    for alphabet in ALPHABETS:
        for _ in range(16):
            result.append("".join(rng.choice(alphabet) for _ in range(rng.randint(1, 24))))
    for _ in range(40):
        parts = [rng.choice(FIXED) for _ in range(rng.randint(2, 5))]
        result.append("".join(parts))
    result += ["a" * 200, " " * 130 + "x", "the" * 70, "\n" * 99, "a\u0301" * 60, "\u4e16\u754c" * 50]
    return result


def main() -> None:
    lines = []
    for kind in ("qwen2", "smollm"):
        spec = tokenizer_json(kind)
        path = OUT / f"tiny_{kind}.json"
        path.write_text(json.dumps(spec, ensure_ascii=True, indent=0) + "\n")
        parse = tokenizers.Tokenizer.from_str(json.dumps(spec))
        literal = tokenizers.Tokenizer.from_str(json.dumps(dict(spec, added_tokens=[])))
        for text in texts():
            ids = parse.encode(text, add_special_tokens=False).ids
            ids_literal = literal.encode(text, add_special_tokens=False).ids
            normalized = literal.normalizer.normalize_str(text) if literal.normalizer else text
            pieces = [len(piece) for piece, _ in literal.pre_tokenizer.pre_tokenize_str(normalized)]
            lines.append(
                {"tokenizer": kind, "text": text, "ids": ids, "ids_literal": ids_literal, "pieces": pieces,
                 "decoded": parse.decode(ids, skip_special_tokens=False)}
            )
    (OUT / "tiny_vectors.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    print(f"{len(lines)} vectors")


if __name__ == "__main__":
    main()
