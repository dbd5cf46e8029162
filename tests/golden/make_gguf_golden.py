#!/usr/bin/env python3
"""Writes a GGUF file with the `gguf` package: metadata of every type and one tensor of every format Baton reads, made of
random bits, and what that package dequantises them to. README.md says what is in them.

  .cache/golden-venv/bin/python tests/golden/make_gguf_golden.py      (set up as in make_logits_golden.py)
"""
import os

import gguf
import numpy as np

DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gguf")
FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
ROWS, COLS = 3, 512
# Byte offsets of the f16 scales in a block: they must be finite; all other bits are free.
SCALES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q4_K": [0, 2], "Q6_K": [208]}


def random_rows(rng, fmt):
    """[ROWS, bytes of a row]."""
    if fmt == "F32":
        return rng.standard_normal((ROWS, COLS)).astype("<f4").view(np.uint8)
    if fmt in ("F16", "BF16"):
        bits = rng.integers(0, 1 << 16, size=(ROWS, COLS), dtype=np.uint16)
        exponent = np.uint16(0x7C00 if fmt == "F16" else 0x7F80)
        bits[(bits & exponent) == exponent] &= ~exponent  # no inf, no NaN; subnormals stay
        return bits.view(np.uint8)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[fmt]]
    blocks = rng.integers(0, 256, size=(ROWS * COLS // values, size), dtype=np.uint8)
    for at in SCALES[fmt]:
        scale = (rng.standard_normal(len(blocks)) * 0.01).astype("<f2")
        scale[0], scale[1] = np.float16(6e-8), np.float16(-3e-6)  # subnormal
        blocks[:, at:at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(ROWS, -1)


def add_metadata(writer):
    writer.add_uint8("test.u8", 255)
    writer.add_int8("test.i8", -128)
    writer.add_uint16("test.u16", 65535)
    writer.add_int16("test.i16", -32768)
    writer.add_uint32("test.u32", 4294967295)
    writer.add_int32("test.i32", -2147483648)
    writer.add_uint64("test.u64", 18446744073709551615)
    writer.add_int64("test.i64", -9223372036854775808)
    writer.add_float32("test.f32", 0.1)
    writer.add_float64("test.f64", 0.1)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "h\u00e9llo \U0001fae0")
    writer.add_array("test.strings", ["", "a", "\u9f9c"])
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -0.25])


def main():
    os.makedirs(DIRECTORY, exist_ok=True)
    rng = np.random.Generator(np.random.SFC64(7))
    writer = gguf.GGUFWriter(os.path.join(DIRECTORY, "formats.gguf"), "test")
    add_metadata(writer)
    expected = []
    for fmt in FORMATS:
        kind = gguf.GGMLQuantizationType[fmt]
        rows = random_rows(rng, fmt)
        expected.append(gguf.quants.dequantize(rows, kind).astype("<f4").reshape(ROWS, COLS))
        data = rows.view("<f4") if fmt == "F32" else rows.view("<f2") if fmt == "F16" else rows
        writer.add_tensor(fmt.lower(), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.concatenate(expected).tofile(os.path.join(DIRECTORY, "formats.f32"))


if __name__ == "__main__":
    main()
