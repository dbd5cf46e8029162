#!/usr/bin/env python3
"""Writes corpus/: small right files for the fuzz targets to start from, and files that once made a reader fail somewhere.
Standard library only; the results are committed.
"""
import json
import os
import struct

CORPUS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus")


def write(target, name, data):
    os.makedirs(os.path.join(CORPUS, target), exist_ok=True)
    with open(os.path.join(CORPUS, target, name), "wb") as f:
        f.write(data)


def safetensors(header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def make_safetensors():
    two = {"__metadata__": {"format": "pt"}, "a": tensor("F32", [2, 3], 0, 24), "b": tensor("BF16", [2], 24, 28)}
    write("safetensors", "two_tensors", safetensors(two, bytes(28)))
    write("safetensors", "scalar", safetensors({"s": tensor("F16", [], 0, 2)}, bytes(2)))
    write("safetensors", "no_tensors", safetensors({}))
    write("safetensors", "empty_tensor", safetensors({"e": tensor("I64", [0, 4], 0, 0)}))
    write("safetensors", "length_0", safetensors(two, bytes(28), 0))
    write("safetensors", "length_7", safetensors(two, bytes(28), 7))
    write("safetensors", "length_2_63", safetensors(two, bytes(28), 1 << 63))
    write("safetensors", "length_max", safetensors(two, bytes(28), (1 << 64) - 1))
    write("safetensors", "size_overflows", safetensors({"o": tensor("F32", [1 << 62, 4], 0, 0)}))
    write("safetensors", "overlap", safetensors({"a": tensor("U8", [2], 0, 2), "b": tensor("U8", [2], 1, 3)}, bytes(3)))
    write("safetensors", "nesting", safetensors(b"[" * 4096))
    write("safetensors", "short", b"\x01\x02\x03")


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def make_gguf():
    keys = [key("general.architecture", 8, text("llama")), key("llama.block_count", 4, struct.pack("<I", 1)),
            key("llama.context_length", 4, struct.pack("<I", 64)),
            key("llama.embedding_length", 4, struct.pack("<I", 32)),
            key("llama.feed_forward_length", 4, struct.pack("<I", 32)),
            key("llama.attention.head_count", 4, struct.pack("<I", 2)),
            key("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
            key("llama.rope.scaling.type", 8, text("yarn")), key("llama.rope.scaling.factor", 6, struct.pack("<f", 2)),
            key("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("<|im_end|>") + text("a")),
            key("tokenizer.ggml.token_type", 9, struct.pack("<IQ", 5, 2) + struct.pack("<2i", 3, 1))]
    tensors = text("token_embd.weight") + struct.pack("<I2QIQ", 2, 32, 2, 8, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(keys) + tensors
    write("gguf", "llama", head + bytes(-len(head) % 32) + bytes(68))
    write("gguf", "empty", b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    write("gguf", "version_2", b"GGUF" + struct.pack("<IQQ", 2, 0, 1) + key("general.alignment", 4, struct.pack("<I", 8)))
    write("gguf", "counts_max", b"GGUF" + struct.pack("<IQQ", 3, (1 << 64) - 1, (1 << 64) - 1))
    write("gguf", "string_2_63", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 63) + b"key")
    write("gguf", "array_2_62", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key("a", 9, struct.pack("<IQ", 10, 1 << 62)))
    write("gguf", "nested_array", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key("a", 9, struct.pack("<IQ", 9, 1)))
    write("gguf", "shape_overflows", b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w") +
          struct.pack("<I4QIQ", 4, 1 << 16, 1 << 16, 1 << 16, 1 << 16, 0, 0))


def make_config():
    base = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 96, "vocab_size": 256,
            "max_position_embeddings": 4096, "eos_token_id": [1, 2]}
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 3, "do_sample": True}
    both = json.dumps(base).encode() + b"\0" + json.dumps(generation).encode()
    write("config", "qwen3_with_generation", both)
    new = {**base, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "mscale": 1.0,
                                       "mscale_all_dim": 0.5, "truncate": False}}
    write("config", "rope_parameters", json.dumps(new).encode())
    write("config", "linear", json.dumps({**base, "rope_scaling": {"type": "linear", "factor": 1024.0}}).encode())
    write("config", "sliding", json.dumps({**base, "layer_types": ["full_attention"] * 2, "sliding_window": 4}).encode())
    write("config", "huge", json.dumps({**base, "hidden_size": 1 << 62, "head_dim": 1e308}).encode())
    write("config", "not_an_object", b"[[[[]]]]")


def frame(kind, body):
    return struct.pack("<IHHII", 0x314E5442, kind, 0, len(body), 0) + body


def unit(sequence, layer, size=320, checksum=None, reservation=7):
    rect = struct.pack("<6I", 0, 1, layer, layer + 1, 0, 1)
    return frame(5, struct.pack("<QQI", reservation, 1, sequence) + rect +
                 struct.pack("<IQQ", checksum is not None, size, checksum or 0))


def make_frames():
    # As frame_fuzz.cc reads them: first byte odd, the peer writes by itself; even, payload follows in the stream.
    head = frame(1, b"t") + frame(3, struct.pack("<QQ", 7, 1))
    body = bytes(range(256)) + bytes(64)
    write("frame", "tcp", b"\0" + head + unit(0, 0) + body + unit(1, 1) + body + frame(7, struct.pack("<Q", 99)) +
          bytes(99) + frame(9, struct.pack("<Q", 1)))
    write("frame", "shm", b"\1" + head + unit(0, 0) + unit(1, 1) + frame(7, struct.pack("<Q", 99)))
    write("frame", "twice", b"\0" + head + unit(0, 0) + body + unit(1, 0) + body)
    write("frame", "checksum", b"\0" + head + unit(0, 0, checksum=1) + body)
    write("frame", "stranger", b"\0" + head + unit(0, 0, reservation=8) + body + unit(0, 1) + body)
    write("frame", "cut", b"\0" + head + unit(0, 0) + body[:77])
    write("frame", "too_long", b"\0" + head + unit(0, 0, size=1 << 63) + body)
    write("frame", "no_token", b"\0" + frame(1, b"x") + head)


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number, value):
    """One field of a protobuf message: int, float or bytes."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value & (1 << 64) - 1)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def make_requests():
    # As request_fuzz.cc reads them: 0 a client's request, 1 a router's, 2 a peer's messages with a length before each.
    bias = lambda token, value: field(9, field(1, token) + field(2, value))
    sampling = (field(1, 0.7) + field(2, 40) + field(3, 0.9) + field(5, 1 << 63) + bias(5, -100.0) + field(10, "stop") + field(11, 7) +
                field(13, 1) + field(14, 16) + field(15, 3) + field(16, 2))
    ids = b"".join(varint(i) for i in (5, 6, 999))
    write("request", "ids", b"\0" + field(3, field(1, ids)) + field(6, sampling) + field(8, "salt") + field(11, 3))
    write("request", "text", b"\0" + field(2, "In the beginning") + field(5, 1) + field(6, field(6, 1.3) + field(7, -2.0) + field(8, 2.0)))
    write("request", "chat", b"\0" + field(4, field(1, field(1, "user") + field(2, "hello")) + field(3, 1)) + field(6, field(10, "a" * 256)))
    write("request", "not_numbers", b"\0" + field(3, field(1, ids)) + field(6, field(1, float("nan")) + field(3, float("inf")) + bias(5, float("nan"))))
    write("request", "too_much", b"\0" + field(3, field(1, varint(1) * 4096)) + field(6, field(16, (1 << 32) - 1) + field(14, (1 << 32) - 1) + field(2, -5)))
    inside = (field(1, 1.0) + field(3, 1.0) + field(6, 1.0) + bias(5, 3.0) + field(10, b"\xff\0") + field(11, 7) + field(13, 64) + field(14, -1) + field(15, 1))
    write("request", "spec", b"\1" + field(1, "req-1") + field(3, ids) + field(4, inside) + field(5, b"salt") + field(7, -1))
    write("request", "spec_resumed", b"\1" + field(3, ids) + field(4, inside) + field(6, 2))
    write("request", "spec_choices", b"\1" + field(3, ids) + field(4, inside + field(15, (1 << 32) - 1) + field(16, (1 << 32) - 1)) + field(6, (1 << 32) - 1))
    handoff = field(1, field(1, "decode") + varint(2 << 3 | 1) + struct.pack("<Q", 7) + field(3, 1))
    token = field(4, field(3, 9) + field(6, field(1, 3) + field(2, -0.5)))
    messages = {"commit": field(2, handoff + field(2, 2) + field(3, 640) + token), "quiesced": field(5, handoff), "abort": field(6, handoff + field(2, "no")),
                "heartbeat": field(7, field(1, 3)), "hello": field(1, field(2, "prefill") + field(3, field(13, 1)))}
    peer = lambda *names: b"\2" + b"".join(bytes([len(messages[n])]) + messages[n] for n in names)
    write("request", "peer_commit", peer("heartbeat", "commit", "commit", "quiesced"))
    write("request", "peer_abort", peer("abort", "abort", "commit"))
    write("request", "peer_hello", peer("hello", "quiesced", "hello"))


def make_token_files():
    secret = "0123456789abcdef"
    write("token_file", "all", f"# tokens\nalice secret:{secret} rate=2.5 burst=7 concurrent=3\nbob sha256:{secret * 4} tenant=team expires=2030-01-31T12:00:00Z\n".encode())
    write("token_file", "header", f"Bearer {secret}\n".encode())
    write("token_file", "numbers", f"a secret:{secret} rate=1e308 burst=-0 concurrent=4294967296\n".encode())
    write("token_file", "binary", b"a secret:" + bytes(range(256)) + b" tenant=\xff\n")
    write("token_file", "twice", f"a secret:{secret}\na secret:{secret}x\n".encode())


if __name__ == "__main__":
    make_requests()
    make_token_files()
    make_frames()
    make_safetensors()
    make_gguf()
    make_config()
