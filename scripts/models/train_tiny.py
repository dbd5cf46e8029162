#!/usr/bin/env python3
"""Trains tiny-qwen3 or tiny-qwen3-draft on the King James Version and writes the Hugging Face directory.

Needs requirements.txt and the Debian package bible-kjv (see tiny_data.py). One thread, for the minutes asked: the
learning rate follows the clock, so a run ends in time on any machine and its weights are its own. What the committed
ones took is in tests/data/models/README.md.

Examples:
  train_tiny.py tiny-qwen3 --out tests/data/models/tiny-qwen3 --held-out tests/data/text/heldout.txt
  train_tiny.py tiny-qwen3-draft --out tests/data/models/tiny-qwen3-draft
"""
import argparse
import array
import json
import math
import os
import sys
import time

import tokenizers
import torch
import transformers

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import hf_files  # noqa: E402
import tiny_data  # noqa: E402

CONTEXT = 2048
ROPE_THETA = 10000
WINDOW = 256  # Tokens of a training row; the last tenth of the run sees steps of one row of CONTEXT tokens.
STEP_TOKENS = 512
WARM_UP = 0.03  # Share of the run, as LONG_FROM is.
LONG_FROM = 0.9
SAVE_SECONDS = 300
WEIGHT_DECAY = 0.1
PRESETS = {
    "tiny-qwen3": {
        "shape": {"hidden": 192, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512},
        "minutes": 45, "rate": 2e-3},
    "tiny-qwen3-draft": {
        "shape": {"hidden": 96, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256},
        "minutes": 12, "rate": 3e-3},
}


def make_config(shape):
    return hf_files.qwen3_config(vocab=tiny_data.VOCAB, tied=True, context=CONTEXT, num_tokens=tiny_data.NUM_TOKENS,
                                 rope_theta=ROPE_THETA, **shape)


def make_model(config, start_dir=None):
    """New weights, or those of an earlier run's directory."""
    if start_dir:
        return transformers.Qwen3ForCausalLM.from_pretrained(start_dir, dtype=torch.float32)
    torch.manual_seed(1)
    settings = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype")}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))


class Batches:
    """Endless batches of [rows, length] ids; every epoch is shuffled anew and holds other chats."""

    def __init__(self, chapters, tokenizer, epoch):
        self.chapters, self.tokenizer = chapters, tokenizer
        self.stream, self.epoch, self.at = [], epoch, 0

    def next(self, length):
        count = max(STEP_TOKENS, length)
        if self.at + count > len(self.stream):
            self.epoch, self.at = self.epoch + 1, 0
            self.stream = tiny_data.token_stream(self.chapters, self.tokenizer, self.epoch)
        self.at += count
        return torch.tensor(self.stream[self.at - count:self.at]).view(-1, length)


def loss_of(model, ids):
    """Mean cross entropy of the next id, f32."""
    logits = model(ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def held_out_loss(model, ids, window=256):
    """Mean over windows of `window` ids, each from an empty context; the rest at the end is left out."""
    rows = torch.tensor(ids[:len(ids) // window * window]).view(-1, window)
    model.eval()
    with torch.no_grad():
        loss = sum(loss_of(model, r).item() * len(r) for r in rows.split(16)) / len(rows)
    model.train()
    return loss


def make_optimizer(model, rate):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def rate_at(done, rate):
    """`done` is the share of the run. Linear warm-up, then a cosine down to a fiftieth."""
    if done < WARM_UP:
        return rate * (0.05 + 0.95 * done / WARM_UP)
    angle = math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))
    return rate * (0.02 + 0.98 * (1 + math.cos(angle)) / 2)


def train(model, batches, held_ids, minutes, rate, save_now):
    optimizer = make_optimizer(model, rate)
    model.train()
    start, saved, step, tokens, shown = time.time(), time.time(), 0, 0, 0.0
    while (done := (time.time() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(done, rate)
        ids = batches.next(WINDOW if done < LONG_FROM else CONTEXT)
        loss = loss_of(model, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.numel()
        shown = loss.item() if step == 1 else 0.99 * shown + 0.01 * loss.item()
        if step % 100 == 0:
            print(f"step={step} done={done:.3f} epoch={batches.epoch} tokens={tokens} loss={shown:.4f}", flush=True)
        if time.time() - saved > SAVE_SECONDS:
            print(f"held_out_loss={held_out_loss(model, held_ids):.4f}", flush=True)
            save_now()
            saved = time.time()


def save(model, config, tokenizer_json, directory):
    os.makedirs(directory, exist_ok=True)
    tensors = []
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # Tied to the embedding.
            continue
        bits = weight.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        tensors.append((name, list(weight.shape), array.array("H", bits)))
    hf_files.write_safetensors(os.path.join(directory, "model.safetensors"), tensors)
    hf_files.write_json(directory, "config.json", config)
    hf_files.write_json(directory, "generation_config.json", hf_files.generation_config(tiny_data.NUM_TOKENS))
    hf_files.write_json(directory, "tokenizer.json", tokenizer_json, indent=None)
    hf_files.write_json(directory, "tokenizer_config.json", hf_files.tokenizer_config(tiny_data.NUM_TOKENS, CONTEXT))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=sorted(PRESETS))
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--held-out", metavar="FILE", help="also write the held-out text")
    parser.add_argument("--minutes", type=float, help="instead of the preset's")
    parser.add_argument("--start", metavar="DIR", help="go on from the weights of an earlier run")
    parser.add_argument("--epoch", type=int, default=0, help="epochs of text that earlier runs have used")
    args = parser.parse_args()
    preset = PRESETS[args.preset]
    torch.set_num_threads(1)
    chapters, held = tiny_data.split_chapters(tiny_data.read_chapters())
    tokenizer_json = tiny_data.train_tokenizer(chapters)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json))
    held_text = tiny_data.held_out_text(held)
    if args.held_out:
        with open(args.held_out, "w", encoding="utf-8") as f:
            f.write(held_text)
    config = make_config(preset["shape"])
    model = make_model(config, args.start)
    print(f"parameters={sum(p.numel() for p in model.parameters())}", flush=True)
    held_ids = tokenizer.encode(held_text).ids
    train(model, Batches(chapters, tokenizer, args.epoch), held_ids, args.minutes or preset["minutes"], preset["rate"],
          lambda: save(model, config, tokenizer_json, args.out))
    save(model, config, tokenizer_json, args.out)
    model.to(torch.bfloat16).to(torch.float32)
    loss = held_out_loss(model, held_ids)
    print(f"held_out_loss={loss:.4f} held_out_perplexity={math.exp(loss):.3f} (bf16 weights, f32 arithmetic)")


if __name__ == "__main__":
    main()
