"""Writes the files of a Hugging Face model directory as Qwen3 checkpoints have them. Standard library only.

What is here: the byte alphabet of byte-level BPE, a BPE that can be grown entry by entry, tokenizer.json and
tokenizer_config.json, config.json and generation_config.json, and a safetensors writer.

A tokenizer made here has the shape of Qwen3's own: ids 0..255 are the bytes in the GPT-2 order, merge number i makes id
256 + i, every entry run through BPE alone gives exactly itself, and the 26 added tokens follow the last merge.
"""
import array
import json
import os
import struct
import sys

SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>"]
NUM_FLAGGED_SPECIAL = 14  # The first 14 carry "special": true, the rest do not, as in Qwen3.
END_OF_TEXT, IM_START, IM_END = SPECIALS[0], SPECIALS[1], SPECIALS[2]

# Qwen3's pre-tokenizer, character for character: a loader refuses any other.
SPLIT_REGEX = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+")

TEMPLATE_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "qwen3_chat_template.jinja")


def byte_alphabet():
    """List of (byte, stand-in character) in id order: the printable bytes, then the others."""
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    others = [b for b in range(256) if b not in set(printable)]
    return [(b, chr(b)) for b in printable] + [(b, chr(256 + i)) for i, b in enumerate(others)]


STAND_IN = dict(byte_alphabet())
BYTE_OF = {char: byte for byte, char in STAND_IN.items()}


def to_stand_ins(raw):
    return "".join(STAND_IN[b] for b in raw)


def to_bytes(entry):
    return bytes(BYTE_OF[c] for c in entry)


class Bpe:
    """A byte-level BPE vocabulary that grows by whole entries. `tokens[id]` is the entry's bytes."""

    def __init__(self):
        self.tokens = [bytes([b]) for b, _ in byte_alphabet()]
        self.ids = {t: i for i, t in enumerate(self.tokens)}
        self.merges = []  # merges[i] = (left bytes, right bytes), makes id 256 + i
        self._rank = {}  # (left bytes, right bytes) -> rank

    def encode(self, raw):
        """Ids of `raw` as one pre-token: the lowest rank first, the leftmost on ties."""
        parts = [bytes([b]) for b in raw]
        while len(parts) > 1:
            ranks = [self._rank.get(pair, 1 << 30) for pair in zip(parts, parts[1:])]
            best = min(ranks)
            if best == 1 << 30:
                break
            i = ranks.index(best)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[p] for p in parts]

    def add_merge(self, left, right):
        """Adds left + right as the next entry; both are entries already."""
        self._rank[(left, right)] = len(self.merges)
        self.merges.append((left, right))
        self.ids[left + right] = len(self.tokens)
        self.tokens.append(left + right)

    def add(self, raw, size_max=None):
        """Makes `raw` an entry and returns its id, or None once `size_max` entries are there.

        Each step merges the first two pieces that BPE leaves of `raw`. A new merge ranks after all others, so it can
        never change what an older entry encodes to: every entry goes on giving exactly itself.
        """
        while True:
            pieces = self.encode(raw)
            if len(pieces) == 1:
                return pieces[0]
            if size_max is not None and len(self.tokens) >= size_max:
                return None
            self.add_merge(self.tokens[pieces[0]], self.tokens[pieces[1]])


def tokenizer_json(tokens, merges):
    """tokenizer.json as an object; `tokens` and `merges` in bytes, added tokens follow the last entry."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": len(tokens) + i, "content": s, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": i < NUM_FLAGGED_SPECIAL} for i, s in enumerate(SPECIALS)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": SPLIT_REGEX}, "behavior": "Isolated", "invert": False},
            byte_level]},
        "post_processor": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {to_stand_ins(t): i for i, t in enumerate(tokens)},
            "merges": [[to_stand_ins(a), to_stand_ins(b)] for a, b in merges]}}


def tokenizer_config(num_tokens, context):
    """tokenizer_config.json as an object, with Qwen3's chat template of April 2025."""
    with open(TEMPLATE_FILE, encoding="utf-8") as f:
        template = f.read()
    return {
        "add_bos_token": False, "add_prefix_space": False,
        "added_tokens_decoder": {
            str(num_tokens + i): {"content": s, "lstrip": False, "normalized": False, "rstrip": False,
                                  "single_word": False, "special": i < NUM_FLAGGED_SPECIAL}
            for i, s in enumerate(SPECIALS)},
        "additional_special_tokens": SPECIALS[1:NUM_FLAGGED_SPECIAL], "bos_token": None, "chat_template": template,
        "clean_up_tokenization_spaces": False, "eos_token": IM_END, "errors": "replace", "model_max_length": context,
        "pad_token": END_OF_TEXT, "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None}


def qwen3_config(*, hidden, layers, heads, kv_heads, head_dim, ffn, vocab, tied, context, num_tokens,
                 rope_theta=1000000, std=0.02, dtype="bfloat16"):
    """config.json as an object. `num_tokens` entries come before the added tokens."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": num_tokens, "eos_token_id": num_tokens + SPECIALS.index(IM_END), "head_dim": head_dim,
        "hidden_act": "silu", "hidden_size": hidden, "initializer_range": std, "intermediate_size": ffn,
        "max_position_embeddings": context, "max_window_layers": layers, "model_type": "qwen3",
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": rope_theta, "sliding_window": None,
        "tie_word_embeddings": tied, "torch_dtype": dtype, "use_cache": True, "use_sliding_window": False,
        "vocab_size": vocab}


def generation_config(num_tokens):
    """generation_config.json as an object; both end ids, Qwen3's sampling defaults."""
    return {
        "bos_token_id": num_tokens, "do_sample": True,
        "eos_token_id": [num_tokens + SPECIALS.index(IM_END), num_tokens], "pad_token_id": num_tokens,
        "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def bf16_bits(value):
    """The bf16 pattern nearest to a float, ties to even. NaN and infinity keep their meaning."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    if value != value:
        return 0x7FC0
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def write_json(directory, name, obj, indent=2):
    with open(os.path.join(directory, name), "w", encoding="utf-8") as f:
        json.dump(obj, f, ensure_ascii=False, indent=indent)
        f.write("\n")


def write_safetensors(path, tensors):
    """`tensors`: list of (name, shape, array.array of bf16 patterns), written in this order."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, bits in tensors:
        count = 1
        for extent in shape:
            count *= extent
        if bits.typecode != "H" or len(bits) != count:
            raise ValueError(f"{name}: {len(bits)} values for shape {shape}")
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + 2 * count]}
        offset += 2 * count
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        for _, _, bits in tensors:
            if sys.byteorder != "little":
                bits = array.array("H", bits)
                bits.byteswap()
            f.write(bits.tobytes())
