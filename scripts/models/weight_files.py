"""Writes weights in the formats of safetensors and GGUF files. Needs numpy.

A tensor is named by a spec (name, shape) and made one at a time by a function, so that a model larger than memory can
be written.
"""
import json
import os
import struct

import numpy as np


def f32_to_bf16(x):
    """The nearest bf16 patterns, ties to even. Not for NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)


def bf16_to_f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


# ---------------------------------------------------------------- GGML blocks of 32: scale f16, then the codes
def _with_scale(scale, codes):
    out = np.empty((scale.shape[0], 2 + codes.shape[1]), dtype=np.uint8)
    out[:, :2] = scale.astype("<f2").view(np.uint8).reshape(-1, 2)
    out[:, 2:] = codes
    return out


def _inverse(scale):
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def q8_0(w):
    blocks = w.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1) / np.float32(127)).astype(np.float32)
    codes = np.rint(blocks * _inverse(scale)[:, None]).astype(np.int8)
    return _with_scale(scale, codes.view(np.uint8))


def q4_0(w):
    blocks = w.reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)[:, 0]
    scale = (largest / np.float32(-8)).astype(np.float32)
    shifted = (blocks * _inverse(scale)[:, None] + np.float32(8.5)).astype(np.int8)
    codes = np.minimum(15, shifted).astype(np.uint8)
    return _with_scale(scale, codes[:, :16] | (codes[:, 16:] << 4))


# name: (GGML type, general.file_type, bytes of 32 values, encoder)
GGUF_FORMATS = {
    "f32": (0, 0, 128, lambda w: w.astype("<f4")),
    "f16": (1, 1, 64, lambda w: w.astype("<f2")),
    "bf16": (30, 32, 64, lambda w: f32_to_bf16(w).astype("<u2")),
    "q8_0": (8, 7, 34, q8_0),
    "q4_0": (2, 2, 18, q4_0),
}
# name: (dtype in the header, bytes, encoder)
SAFETENSORS_FORMATS = {
    "f32": ("F32", 4, lambda w: w.astype("<f4")),
    "f16": ("F16", 2, lambda w: w.astype("<f2")),
    "bf16": ("BF16", 2, lambda w: f32_to_bf16(w).astype("<u2")),
}


# ---------------------------------------------------------------- safetensors
def _write_shard(path, spec, fmt, make):
    dtype, size, encode = SAFETENSORS_FORMATS[fmt]
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in spec:
        num_bytes = int(np.prod(shape)) * size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        for name, shape in spec:
            f.write(encode(make(name, shape)).tobytes())
    return offset


def write_safetensors(directory, spec, fmt, make, num_shards=1):
    """model.safetensors, or `num_shards` shards and their index. `make(name, shape)` gives a tensor as f32."""
    if num_shards == 1:
        _write_shard(os.path.join(directory, "model.safetensors"), spec, fmt, make)
        return
    index, total = {}, 0
    bounds = [len(spec) * i // num_shards for i in range(num_shards + 1)]
    for i in range(num_shards):
        name = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = spec[bounds[i]:bounds[i + 1]]
        total += _write_shard(os.path.join(directory, name), part, fmt, make)
        index.update({tensor: name for tensor, _ in part})
    with open(os.path.join(directory, "model.safetensors.index.json"), "w", encoding="utf-8") as f:
        json.dump({"metadata": {"total_size": total}, "weight_map": index}, f, indent=2)
        f.write("\n")


# ---------------------------------------------------------------- GGUF
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_ALIGNMENT = 32


def _string(text):
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(value):
    """A metadata value with its type: bool, int (u32), float (f32), str, or a list of str or of int (i32)."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_string(v) for v in value)
    return struct.pack("<IIQ", _ARRAY, _I32, len(value)) + np.array(value, dtype="<i4").tobytes()


def write_gguf(path, metadata, spec, fmt, make):
    """`metadata`: dict. `spec`: (name, shape) with the names of GGUF; vectors are always stored as f32."""
    with open(path, "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, len(spec), len(metadata)))
        for key, value in metadata.items():
            f.write(_string(key) + _value(value))
        offset, plan = 0, []
        for name, shape in spec:
            tensor_fmt = fmt if len(shape) == 2 else "f32"
            ggml_type, _, bytes_of_32, encode = GGUF_FORMATS[tensor_fmt]
            num_bytes = int(np.prod(shape)) * bytes_of_32 // 32
            f.write(_string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
            f.write(struct.pack("<IQ", ggml_type, offset))
            plan.append((name, shape, encode, num_bytes))
            offset += num_bytes + (-num_bytes % _ALIGNMENT)
        f.write(b"\0" * (-f.tell() % _ALIGNMENT))
        for name, shape, encode, num_bytes in plan:
            raw = encode(make(name, shape)).tobytes()
            if len(raw) != num_bytes:
                raise ValueError(f"{name}: {len(raw)} bytes, {num_bytes} planned")
            f.write(raw + b"\0" * (-num_bytes % _ALIGNMENT))
