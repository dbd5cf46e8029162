#!/usr/bin/env python3
"""Writes engine/text/unicode_runs.inc from tests/data/tokenizer/unicode_classes.tsv (Unicode 16.0).

Usage: scripts/make_unicode_tables.py [--check]
--check writes nothing and fails when the committed file differs from what would be written.
"""

import hashlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests/data/tokenizer/unicode_classes.tsv"
TARGET = ROOT / "engine/text/unicode_runs.inc"
# Of the string with one class letter per code point, as tests/data/tokenizer/README.md defines it.
EXPECTED_SHA256 = "e1b79c860fb4e42ea99e0aee965624c8fe22c985112fdb7dbdbf3cf6d970e4f3"
NAMES = {"L": "kLetter", "N": "kNumber", "n": "kNewline", "s": "kSpace"}


def main() -> int:
    runs = []
    letters = ["o"] * 0x110000
    letters[0xD800:0xE000] = "-" * 0x800
    for line in SOURCE.read_text().splitlines():
        first, last, letter = line.split("\t")
        first, last = int(first, 16), int(last, 16)
        letters[first : last + 1] = letter * (last + 1 - first)
        runs.append(f"{{0x{first:04X}, 0x{last:04X}, CharClass::{NAMES[letter]}}},")
    if hashlib.sha256("".join(letters).encode()).hexdigest() != EXPECTED_SHA256:
        print(f"{SOURCE}: not the classes of Unicode 16.0", file=sys.stderr)
        return 1
    text = "// Made by scripts/make_unicode_tables.py from Unicode 16.0; not edited by hand.\n"
    text += "\n".join(runs) + "\n"
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != text:
            print(f"{TARGET}: run scripts/make_unicode_tables.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
