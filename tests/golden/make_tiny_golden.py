#!/usr/bin/env python3
"""Writes tiny_qwen3.json: what transformers computes with the trained pair of tests/data/models, in f32 on the CPU.

Needs scripts/models/requirements.txt; the result is committed. Run it from anywhere, without arguments.

The file holds, for the target and the draft:
  perplexity   over tests/data/text/heldout.txt: the ids are cut into windows of 256, each read from an empty cache, the
               rest left out; negative log-likelihoods of the ids 1..255 of every window, their mean and its exponential
  greedy       three prompts: the prompt's ids, 64 ids after them, and how far the two best logits are apart at each;
               end tokens do not stop these
  agreement    share of held-out positions where the draft's best token is the target's
"""
import hashlib
import json
import math
import os
import struct

os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MODELS = os.path.join(ROOT, "tests", "data", "models")
WINDOW = 256
NUM_GREEDY = 64
NUM_PROMPTS = 3
# A greedy path must not hang on rounding: the first prompts are taken whose two best logits are always this far apart.
GAP_MIN = 0.02
PROMPTS = [
    "And it came to pass in those days, that", "In the beginning", "The LORD is my", "And Moses said unto",
    "Blessed are they that", "<|im_start|>user\nWho is the king of Israel?<|im_end|>\n<|im_start|>assistant\n",
    "And David said to Abishai,", "Then Jesus answered and said", "Thou shalt not", "And the king said,",
    "Praise ye the LORD.", "Now these are the names of the children of", "Hear, O Israel:", "And Solomon built",
    "For the wages of", "He that believeth", "And there was a man of", "Woe unto you,", "The fear of the LORD",
    "And in the morning", "The word of the LORD came", "Verily I say unto you,", "And Pharaoh", "Behold,"]


def load(name):
    return transformers.Qwen3ForCausalLM.from_pretrained(os.path.join(MODELS, name), dtype=torch.float32).eval()


def window_rows(ids):
    return torch.tensor(ids[:len(ids) // WINDOW * WINDOW]).view(-1, WINDOW)


def all_logits(model, rows):
    with torch.no_grad():
        return torch.cat([model(r, use_cache=False).logits for r in rows.split(8)])


def perplexity(logits, rows):
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]).double(), rows[:, 1:].reshape(-1), reduction="none")
    losses = losses.view(len(rows), -1)
    mean = losses.mean().item()
    return {"window_nll": [round(x, 5) for x in losses.sum(1).tolist()], "mean_nll": round(mean, 7),
            "perplexity": round(math.exp(mean), 5)}


def greedy(model, prompt_ids):
    """64 ids after the prompt, each from the whole sequence so far, and the gap between the two best logits."""
    ids, gaps = list(prompt_ids), []
    with torch.no_grad():
        for _ in range(NUM_GREEDY):
            top = model(torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
            gaps.append((top.values[0] - top.values[1]).item())
            ids.append(top.indices[0].item())
    return ids[len(prompt_ids):], gaps


def greedy_paths(model, tokenizer):
    paths = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer.encode(prompt).ids
        ids, gaps = greedy(model, prompt_ids)
        if min(gaps) >= GAP_MIN:
            paths.append({"prompt": prompt, "prompt_ids": prompt_ids, "ids": ids,
                          "text": tokenizer.decode(ids, skip_special_tokens=False),
                          "gaps": [round(g, 4) for g in gaps]})
        if len(paths) == NUM_PROMPTS:
            return paths
    raise SystemExit(f"only {len(paths)} prompts have gaps of {GAP_MIN}; add to PROMPTS")


def main():
    torch.set_num_threads(1)
    tokenizer = tokenizers.Tokenizer.from_file(os.path.join(MODELS, "tiny-qwen3", "tokenizer.json"))
    with open(os.path.join(ROOT, "tests", "data", "text", "heldout.txt"), encoding="utf-8") as f:
        ids = tokenizer.encode(f.read()).ids
    rows = window_rows(ids)
    result = {"made_with": {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__},
              "window": WINDOW, "num_ids": len(ids), "num_windows": len(rows),
              "ids_sha256": hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest(), "models": {}}
    best = []
    for name in ("tiny-qwen3", "tiny-qwen3-draft"):
        model = load(name)
        logits = all_logits(model, rows)
        best.append(logits.argmax(-1))
        result["models"][name] = {**perplexity(logits, rows), "greedy": greedy_paths(model, tokenizer)}
    result["agreement"] = round((best[0] == best[1]).double().mean().item(), 5)
    with open(os.path.join(ROOT, "tests", "golden", "tiny_qwen3.json"), "w", encoding="utf-8") as f:
        json.dump(result, f, indent=1)
        f.write("\n")
    for name, model in result["models"].items():
        print(name, "perplexity", model["perplexity"])
    print("agreement", result["agreement"])


if __name__ == "__main__":
    main()
