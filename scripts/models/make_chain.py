#!/usr/bin/env python3
"""Writes the chain model: a tiny Qwen3-shaped checkpoint whose next token depends on the current one alone, by a table.

Standard library only, well under a second. The table decides every greedy answer, whatever the prompt, precision, batch
or KV format: the winning logit is 24, the next best at most 10. So a test can script any output, and with a draft model
whose table differs at chosen places any acceptance pattern.

How it works. Every token has a +-1 code of 64 numbers, no two codes alike in more than 44 places. The embedding of a
token is the code of its successor, the head row of a token is 0.375 times its own code, and attention and MLP add
about 6 % of noise from small random weights. So KV blocks differ from token to token but do not change the answer.

A prompt selects a script by its last token, the trigger (one upper case letter, or a newline):
  newline  a short chat answer, then <|im_end|>; chat prompts end with this newline
  E        U+1FAE0, U+1F979, U+9F9C, whose bytes lie in 4, 3 and 3 tokens; <|im_end|>
  U        bytes that are no UTF-8 between characters that are; <|im_end|>
  I, O     <|im_end|> at once; <|endoftext|> at once
  Z        a short answer that ends with <|endoftext|>
  P        an answer whose last token " st" could begin a stop string such as " stop"; <|im_end|>
  L        a list of thirteen lines, 64 tokens with its end, cut every three bytes or so; <|im_end|>
  W        the letters a to z for ever
  T        <think>, a thought, </think>, an answer; <|im_end|>
After an ignored <|im_end|> the chat script begins again, after <|endoftext|> script Z. Any other last token starts
somewhere in an endless row of words (printable entries) or of odd bytes (the others); a digit is such a token.

chain.json beside the weights says the same for programs: "next" is the table (next[id] is the id after it); "scripts"
has for each trigger "trigger_id", "ids" (after the trigger, end token included; one round of a loop), "text" and "end",
which is <|im_end|>, <|endoftext|> or loop. The draft's chain.json has its own "next" alone.

Variants:
  --script 'A=some text'
      Adds script A, cut into tokens as BPE would, longer where a token is taken. It ends with <|im_end|> unless
      <|endoftext|> or LOOP is written at its end. It may name added tokens: 'A=<think>hm</think>yes<|endoftext|>'.
      \\n, \\t and \\xHH (a byte) are read. A | is a cut: 'A=|st|op| here' gives the tokens "st", "op", " here", and no
      others between cuts; \\x7c is the character itself. A trigger of several characters becomes one token.
      Once --script or --ids is given, the built-in scripts are left out. May be repeated.
  --ids 'A=300,17,5,738'
      The same with token ids of any kind (738 is <|im_end|>, 736 <|endoftext|> while the vocabulary is the usual one).
  --poison nan | huge | token:X
      NaN in the last layer's MLP; weights there so large that it overflows; or NaN in the embedding of trigger X alone,
      so that only requests that read X are hurt.
  --draft-out DIR [--draft-agree 1101]
      Also writes a smaller draft model (one layer): place k of every script follows the same table where character k of
      the pattern (repeated) is 1, else it skips a token.
Both directories get the same tokenizer. The same command line writes the same bytes on every machine.

Examples:
  make_chain.py --out DIR                                  the committed tests/data/models/chain
  make_chain.py --out DIR --script 'A=1, 2, 3 <|im_end|>'
  make_chain.py --out DIR --poison token:E
"""
import argparse
import array
import os
import random
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import chain_vocab  # noqa: E402
import hf_files  # noqa: E402

HIDDEN = 64
CONTEXT = 16384
HEAD_SCALE = 0.375  # Exact in bf16; the winning logit is HEAD_SCALE * HIDDEN.
CODES_DIFFER_MIN = 20  # Places in which two codes differ at least; their product is at most 64 - 2 * 20 = 24.
NOISE = {"qkv": 0.05, "o": 0.004, "mlp_in": 0.05, "mlp_out": 0.02}  # Largest weight; see write_model().
CHAIN = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 128}
DRAFT = {"layers": 1, "heads": 2, "kv_heads": 2, "head_dim": 64, "ffn": 64}
DRAFT_AGREE = "1110110110"
BF16_NAN = 0x7FC0
POISON_HUGE = 1e20


def make_codes(count, rng):
    """`count` codes as bit masks of HIDDEN bits, every two of them CODES_DIFFER_MIN places apart."""
    codes = []
    while len(codes) < count:
        code = rng.getrandbits(HIDDEN)
        if all((code ^ other).bit_count() >= CODES_DIFFER_MIN for other in codes):
            codes.append(code)
    return codes


def code_rows(codes, scale):
    """bf16 matrix [len(codes), HIDDEN] of +-scale."""
    signs = (hf_files.bf16_bits(scale), hf_files.bf16_bits(-scale))
    return array.array("H", [signs[(code >> i) & 1] for code in codes for i in range(HIDDEN)])


def noise(count, largest, rng):
    """`count` bf16 weights drawn from 16 even steps in [-largest, largest]: random enough, and packs well."""
    levels = [hf_files.bf16_bits(largest * (2 * i - 15) / 15) for i in range(16)]
    return array.array("H", rng.choices(levels, k=count))


def layer_tensors(index, shape, rng):
    """Name, shape and weights of one layer: norms of one, the rest noise."""
    q, kv, ffn = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"], shape["ffn"]
    matrices = [
        ("self_attn.q_proj", q, HIDDEN, "qkv"), ("self_attn.k_proj", kv, HIDDEN, "qkv"),
        ("self_attn.v_proj", kv, HIDDEN, "qkv"), ("self_attn.o_proj", HIDDEN, q, "o"),
        ("mlp.gate_proj", ffn, HIDDEN, "mlp_in"), ("mlp.up_proj", ffn, HIDDEN, "mlp_in"),
        ("mlp.down_proj", HIDDEN, ffn, "mlp_out")]
    norms = [("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN),
             ("self_attn.q_norm", shape["head_dim"]), ("self_attn.k_norm", shape["head_dim"])]
    prefix = f"model.layers.{index}."
    one = hf_files.bf16_bits(1.0)
    return ([(f"{prefix}{n}.weight", [size], array.array("H", [one] * size)) for n, size in norms]
            + [(f"{prefix}{n}.weight", [rows, cols], noise(rows * cols, NOISE[kind], rng))
               for n, rows, cols, kind in matrices])


def apply_poison(poison, tensors, shape, vocab):
    """Breaks the weights on purpose; a correct engine ends the requests that meet them with INTERNAL."""
    weights = {name: bits for name, _, bits in tensors}
    mlp = f"model.layers.{shape['layers'] - 1}.mlp."
    if poison == "nan":
        weights[mlp + "down_proj.weight"][0] = BF16_NAN
    elif poison == "huge":
        # silu(g) * u overflows where g > 0. Rows 0 and 1 hold opposite gates, so one of them always does.
        for row, sign in ((0, 1), (1, -1)):
            for i in range(HIDDEN):
                weights[mlp + "gate_proj.weight"][row * HIDDEN + i] = hf_files.bf16_bits(sign * POISON_HUGE * (1 + i))
                weights[mlp + "up_proj.weight"][row * HIDDEN + i] = hf_files.bf16_bits(POISON_HUGE * (1 + i))
    else:
        trigger = poison.removeprefix("token:")
        if trigger not in vocab.scripts:
            raise ValueError(f"--poison {poison}: no script has this trigger")
        weights["model.embed_tokens.weight"][vocab.scripts[trigger][0][0] * HIDDEN] = BF16_NAN


def write_model(directory, vocab, follows, shape, seed, about, poison=None):
    """One model directory. `follows[id]` is the id after `id`; `about` becomes chain.json.

    Noise: v is at most about 0.4 in size, so attention adds 0.004 * 0.4 * sqrt(256) ~ 0.02 to each of the 64 numbers;
    the MLP adds about as much. A code of +-1 keeps its sign by far, also with weights of four bits.
    """
    rng = random.Random(seed)
    codes = make_codes(vocab.size(), random.Random("codes"))
    tensors = [("model.embed_tokens.weight", [vocab.size(), HIDDEN], code_rows([codes[t] for t in follows], 1.0))]
    for index in range(shape["layers"]):
        tensors += layer_tensors(index, shape, rng)
    tensors.append(("model.norm.weight", [HIDDEN], array.array("H", [hf_files.bf16_bits(1.0)] * HIDDEN)))
    tensors.append(("lm_head.weight", [vocab.size(), HIDDEN], code_rows(codes, HEAD_SCALE)))
    if poison:
        apply_poison(poison, tensors, shape, vocab)
    os.makedirs(directory, exist_ok=True)
    hf_files.write_safetensors(os.path.join(directory, "model.safetensors"), tensors)
    config = hf_files.qwen3_config(hidden=HIDDEN, vocab=vocab.size(), tied=False, context=CONTEXT,
                                   num_tokens=vocab.num_tokens, **shape)
    hf_files.write_json(directory, "config.json", config)
    hf_files.write_json(directory, "generation_config.json", hf_files.generation_config(vocab.num_tokens))
    hf_files.write_json(directory, "tokenizer.json",
                        hf_files.tokenizer_json(vocab.bpe.tokens, vocab.bpe.merges), indent=None)
    hf_files.write_json(directory, "tokenizer_config.json", hf_files.tokenizer_config(vocab.num_tokens, CONTEXT))
    hf_files.write_json(directory, "chain.json", about, indent=None)


def describe(vocab, follows):
    """chain.json: the table and, for each trigger, what this model answers."""
    scripts = {}
    for trigger, (ids, after) in vocab.scripts.items():
        loops = after == ids[1] if len(ids) > 1 else False
        answer = ids[1:] + ([] if loops else [after])
        text = b"".join(vocab.token_bytes(t) for t in ids[1:]).decode("utf-8", "replace")
        scripts[trigger] = {"trigger_id": ids[0], "ids": answer, "text": text,
                            "end": "loop" if loops else vocab.token_bytes(after).decode()}
    return {"next": follows, "scripts": scripts}


def draft_table(vocab, follows, agree):
    """The draft's table: where the pattern says 0 it skips a token, elsewhere it is the target's."""
    table = list(follows)
    for ids, _ in vocab.scripts.values():
        for place, token in enumerate(ids):
            if agree[place % len(agree)] == "0":
                table[token] = follows[follows[token]]
    scripted = {t for ids, _ in vocab.scripts.values() for t in ids}
    for place, token in enumerate(t for t in range(vocab.num_tokens) if t not in scripted):
        if agree[place % len(agree)] == "0":
            table[token] = follows[follows[token]]
    return table


def unescape(text):
    """Reads \\n, \\t and \\xHH (a byte) in UTF-8 text; returns bytes."""
    named = {b"n": b"\n", b"t": b"\t", b"\\": b"\\"}
    return re.sub(rb"\\(n|t|\\|x[0-9a-fA-F]{2})",
                  lambda m: named.get(m[1]) or bytes([int(m[1][1:], 16)]), text.encode())


def text_script(vocab, argument):
    """--script TRIGGER=TEXT."""
    trigger, _, text = argument.partition("=")
    end = chain_vocab.END
    for name in (chain_vocab.END, chain_vocab.TEXT_END, chain_vocab.LOOP):
        if text.endswith(name):
            text, end = text[:-len(name)], name
            break
    parts = []
    for piece in chain_vocab.split_added(text):
        if piece in hf_files.SPECIALS:
            parts.append(piece)
        elif "|" in piece:
            parts += [unescape(p) for p in piece.split("|") if p]
        else:
            parts += vocab.cut(unescape(piece), taken=parts)
    vocab.add_script(unescape(trigger).decode(), parts + [end])


def id_script(argument):
    """--ids TRIGGER=ID,ID."""
    trigger, _, ids = argument.partition("=")
    return trigger, [int(i) for i in ids.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--script", action="append", default=[], metavar="TRIGGER=TEXT")
    parser.add_argument("--ids", action="append", default=[], metavar="TRIGGER=ID,ID")
    parser.add_argument("--poison", metavar="nan|huge|token:X")
    parser.add_argument("--draft-out", metavar="DIR")
    parser.add_argument("--draft-agree", default=DRAFT_AGREE, metavar="PATTERN")
    args = parser.parse_args()
    if args.poison and args.poison not in ("nan", "huge") and not args.poison.startswith("token:"):
        parser.error("--poison takes nan, huge or token:X")
    if not re.fullmatch("[01]+", args.draft_agree):
        parser.error("--draft-agree takes a row of 0 and 1")
    try:
        vocab = chain_vocab.Vocab() if args.script or args.ids else chain_vocab.built_in()
        for script in args.script:
            text_script(vocab, script)
        vocab.finish(dict(id_script(argument) for argument in args.ids))
        follows = vocab.next_tokens(random.Random("order"))
        write_model(args.out, vocab, follows, CHAIN, "chain", describe(vocab, follows), args.poison)
        if args.draft_out:
            table = draft_table(vocab, follows, args.draft_agree)
            write_model(args.draft_out, vocab, table, DRAFT, "draft", {"next": table})
    except ValueError as error:
        sys.exit(f"make_chain.py: {error}")


if __name__ == "__main__":
    main()
