#!/usr/bin/env python3
"""Writes a Qwen3-shaped model with random weights, for speed measurements and load tests. Needs numpy, no network.

All outputs come from the same seeded weights, rounded to bf16:
  --hf DIR      Hugging Face directory: config.json, generation_config.json, tokenizer files, safetensors
  --gguf FILE   GGUF version 3, with the tokenizer in its metadata
The same command line writes the same weights again with the same numpy.

The tokenizer has the true number of entries and the true ids of the added tokens. Its merges are made up (pairs of
bytes, then a pair and a byte), so every text can be encoded and every id decoded.

Examples:
  make_random_qwen3.py --preset tiny --hf .cache/models/random-tiny
  make_random_qwen3.py --preset qwen3-0.6b --gguf .cache/models/q06-q8_0.gguf --gguf-dtype q8_0
"""
import argparse
import os
import sys
import zlib

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "models"))
import decoder_spec  # noqa: E402
import hf_files  # noqa: E402
import weight_files  # noqa: E402

# layers, hidden, heads, KV heads, head dim, ffn, vocabulary, tied head, entries before the added tokens
PRESETS = {
    "tiny": (2, 64, 4, 2, 32, 128, 512, True, 448),
    "small": (4, 256, 8, 4, 64, 768, 2048, True, 1984),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936, True, 151643),
    "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, 151936, True, 151643),
    "qwen3-4b": (36, 2560, 32, 8, 128, 9728, 151936, True, 151643),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 151936, False, 151643),
}
CONTEXT = 40960
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type


def config_of(preset, std, dtype):
    layers, hidden, heads, kv_heads, head_dim, ffn, vocab, tied, num_tokens = PRESETS[preset]
    return hf_files.qwen3_config(
        hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab,
        tied=tied, context=CONTEXT, num_tokens=num_tokens, std=std,
        dtype={"bf16": "bfloat16", "f16": "float16", "f32": "float32"}[dtype])


def make_tensor(seed, std, hf_name, shape):
    """f32 with values of bf16. Each tensor has a stream of its own, so that no format changes another's numbers."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(hf_name.encode())]))
    x = rng.standard_normal(shape, dtype=np.float32)
    x = 1 + np.float32(0.05) * x if len(shape) == 1 else x * np.float32(std)
    return weight_files.bf16_to_f32(weight_files.f32_to_bf16(x))


def make_bpe(num_tokens):
    """A vocabulary of bytes, pairs of bytes, and a pair and a byte.

    Pair (a, b) has rank 256 a + b, so for a < b the merge of a b comes before that of b c for every c: such three bytes
    always end up as pair and byte, and the entry can be reached.
    """
    bpe = hf_files.Bpe()
    bytes_in_order = list(bpe.tokens)
    pairs = [(a, b) for a in bytes_in_order for b in bytes_in_order]
    for left, right in pairs[:num_tokens - 256]:
        bpe.add_merge(left, right)
    for i, a in enumerate(bytes_in_order):
        for b in bytes_in_order[i + 1:]:
            for c in bytes_in_order:
                if len(bpe.tokens) >= num_tokens:
                    return bpe
                bpe.add_merge(a + b, c)
    return bpe


def write_hf(directory, preset, seed, std, dtype):
    os.makedirs(directory, exist_ok=True)
    config = config_of(preset, std, dtype)
    bpe = make_bpe(config["bos_token_id"])
    hf_files.write_json(directory, "config.json", config)
    hf_files.write_json(directory, "generation_config.json", hf_files.generation_config(len(bpe.tokens)))
    hf_files.write_json(directory, "tokenizer.json", hf_files.tokenizer_json(bpe.tokens, bpe.merges), indent=None)
    hf_files.write_json(directory, "tokenizer_config.json", hf_files.tokenizer_config(len(bpe.tokens), CONTEXT))
    spec = [(hf, shape) for hf, _, shape in decoder_spec.decoder_spec(config)]
    weight_files.write_safetensors(directory, spec, dtype, lambda name, shape: make_tensor(seed, std, name, shape))


def gguf_metadata(preset, config, dtype):
    bpe = make_bpe(config["bos_token_id"])
    tokens = [hf_files.to_stand_ins(t) for t in bpe.tokens]
    types = [NORMAL] * len(tokens)
    for i, special in enumerate(hf_files.SPECIALS):
        tokens.append(special)
        types.append(CONTROL if i < hf_files.NUM_FLAGGED_SPECIAL else USER_DEFINED)
    for i in range(len(tokens), config["vocab_size"]):
        tokens.append(f"[PAD{i}]")
        types.append(UNUSED)
    with open(hf_files.TEMPLATE_FILE, encoding="utf-8") as f:
        template = f.read()
    return {
        "general.architecture": "qwen3", "general.name": f"random {preset}",
        "general.file_type": weight_files.GGUF_FORMATS[dtype][1], "general.quantization_version": 2,
        "qwen3.block_count": config["num_hidden_layers"], "qwen3.context_length": CONTEXT,
        "qwen3.embedding_length": config["hidden_size"], "qwen3.feed_forward_length": config["intermediate_size"],
        "qwen3.attention.head_count": config["num_attention_heads"],
        "qwen3.attention.head_count_kv": config["num_key_value_heads"],
        "qwen3.attention.key_length": config["head_dim"], "qwen3.attention.value_length": config["head_dim"],
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6, "qwen3.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{hf_files.to_stand_ins(a)} {hf_files.to_stand_ins(b)}" for a, b in bpe.merges],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["bos_token_id"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"], "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": template,
    }


def write_gguf(path, preset, seed, std, dtype):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    config = config_of(preset, std, "bf16")
    names = decoder_spec.decoder_spec(config)
    hf_name = {gguf: hf for hf, gguf, _ in names}
    weight_files.write_gguf(path, gguf_metadata(preset, config, dtype), [(gguf, shape) for _, gguf, shape in names],
                            dtype, lambda name, shape: make_tensor(seed, std, hf_name[name], shape))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--std", type=float, default=0.02, help="standard deviation of the matrices")
    parser.add_argument("--hf", metavar="DIR")
    parser.add_argument("--hf-dtype", choices=sorted(weight_files.SAFETENSORS_FORMATS), default="bf16")
    parser.add_argument("--gguf", metavar="FILE")
    parser.add_argument("--gguf-dtype", choices=sorted(weight_files.GGUF_FORMATS), default="bf16")
    args = parser.parse_args()
    if not args.hf and not args.gguf:
        parser.error("nothing to write: give --hf, --gguf or both")
    if args.hf:
        write_hf(args.hf, args.preset, args.seed, args.std, args.hf_dtype)
    if args.gguf:
        write_gguf(args.gguf, args.preset, args.seed, args.std, args.gguf_dtype)


if __name__ == "__main__":
    main()
