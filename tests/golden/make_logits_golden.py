#!/usr/bin/env python3
"""Writes the random checkpoints in tests/data/models and what PyTorch and transformers compute with them.

Needs the pinned packages of requirements.txt (several GB), so it is no part of the test runs; the results are
committed. README.md says what is in them. Run it from anywhere:
  python3 -m venv .cache/golden-venv && .cache/golden-venv/bin/pip install -r tests/golden/requirements.txt
  .cache/golden-venv/bin/python tests/golden/make_logits_golden.py [NAME...]
"""
import json
import os
import sys
import zlib

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "scripts", "models"))
import decoder_spec  # noqa: E402
import weight_files  # noqa: E402

NUM_GREEDY = 64
# The greedy path must not hang on rounding: seeds are tried until the two best logits are always this far apart.
GAP_MIN = 0.02
CLASSES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

# name: (kind, heads, KV heads, head dim, hidden, ffn, layers, tied, rope_theta, max positions, rope_scaling,
#        stored format, shards, prompt tokens)
MODELS = {
    "random-qwen3-gqa2-tied": ("qwen3", 4, 2, 64, 32, 96, 2, True, 1e6, 512, None, "f32", 1, 150),
    "random-qwen3-gqa1-hd128": ("qwen3", 2, 2, 128, 64, 96, 2, False, 1e6, 512, None, "bf16", 1, 129),
    "random-qwen3-gqa4-yarn": ("qwen3", 4, 1, 64, 64, 96, 2, True, 1e4, 64, YARN, "bf16", 1, 170),
    "random-qwen3-gqa5-shards": ("qwen3", 5, 1, 64, 80, 112, 2, False, 1e6, 512, None, "f16", 3, 100),
    "random-qwen2-gqa2-tied": ("qwen2", 4, 2, 64, 64, 96, 2, True, 1e6, 512, None, "bf16", 1, 200),
    "random-qwen2-gqa1-linear": ("qwen2", 2, 2, 64, 128, 64, 2, False, 1e4, 128,
                                 {"rope_type": "linear", "factor": 2.0}, "bf16", 2, 140),
    "random-llama-gqa1": ("llama", 2, 2, 64, 64, 160, 2, False, 1e4, 512, None, "bf16", 1, 191),
    "random-llama-gqa4-hd128": ("llama", 4, 1, 128, 64, 96, 2, True, 5e5, 512, None, "f16", 1, 127),
    "random-llama-gqa2-yarn": ("llama", 4, 2, 64, 64, 96, 2, False, 1e4, 256,
                               {**YARN, "attention_factor": 1.25, "beta_fast": 16.0, "beta_slow": 2.0}, "bf16", 1, 160),
}
VOCAB = 256


def config_of(name):
    kind, heads, kv_heads, head_dim, hidden, ffn, layers, tied, theta, context, scaling, fmt, _, _ = MODELS[name]
    config = {
        "architectures": [CLASSES[kind]], "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1,
        "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": ffn,
        "max_position_embeddings": context, "model_type": kind, "num_attention_heads": heads,
        "num_hidden_layers": layers, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6, "rope_scaling": scaling,
        "rope_theta": theta, "tie_word_embeddings": tied,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[fmt], "use_cache": True,
        "vocab_size": VOCAB}
    if hidden != heads * head_dim:  # else left to the default of readers
        config["head_dim"] = head_dim
    if kind != "qwen2":
        config["attention_bias"] = False
    return config


def make_tensor(seed, fmt, name, shape):
    """f32 values that the stored format holds exactly. Matrices keep the size of their input, so that every layer
    matters; wide norms of q and k make attention sharp."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    x = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        x = np.float32(1.6) + np.float32(0.3) * x
    elif name.endswith("norm.weight"):
        x = 1 + np.float32(0.2) * x
    elif name.endswith(".bias"):
        x *= np.float32(0.5)
    elif name == "model.embed_tokens.weight":
        x *= np.float32(0.5)
    else:
        x *= np.float32(1.4 / np.sqrt(shape[1]))
    if fmt == "bf16":
        return weight_files.bf16_to_f32(weight_files.f32_to_bf16(x))
    return x.astype(np.float16).astype(np.float32) if fmt == "f16" else x


def write_model(name, seed):
    fmt, num_shards = MODELS[name][11:13]
    directory = os.path.join(ROOT, "tests", "data", "models", name)
    os.makedirs(directory, exist_ok=True)
    for old in os.listdir(directory):
        os.remove(os.path.join(directory, old))
    config = config_of(name)
    with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=2)
        f.write("\n")
    spec = [(hf, shape) for hf, _, shape in decoder_spec.decoder_spec(config)]
    weight_files.write_safetensors(directory, spec, fmt, lambda n, shape: make_tensor(seed, fmt, n, shape), num_shards)
    return directory


def load(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, torch_dtype=torch.float32, attn_implementation="eager").eval()


def prompt_of(name, seed):
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(b"prompt")]))
    return [int(i) for i in rng.integers(2, VOCAB, size=MODELS[name][13])]


@torch.no_grad()
def greedy(model, prompt):
    """The prompt with its greedy continuation, and the gap between the two best logits at every step. Without a cache:
    each step computes everything anew."""
    ids, gaps = list(prompt), []
    for _ in range(NUM_GREEDY):
        best = torch.topk(model(torch.tensor([ids])).logits[0, -1], 2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids, gaps


def positions_of(num_prompt):
    """Around the edges of 64-token blocks, the end of the prompt, and two decoded ones."""
    edges = [0, 1, 31, 63, 64, 65, 127, 128]
    return sorted({p for p in edges if p < num_prompt} | {num_prompt - 1, num_prompt + 20, num_prompt + NUM_GREEDY - 2})


@torch.no_grad()
def write_golden(name, seed, model, prompt, ids, gaps):
    positions = positions_of(len(prompt))
    logits = model(torch.tensor([ids])).logits[0, positions].numpy()
    rotary = model.model.rotary_emb
    base = os.path.join(ROOT, "tests", "golden", "logits", name)
    logits.astype("<f4").tofile(base + ".f32")
    golden = {
        "model": f"tests/data/models/{name}", "vocab": VOCAB, "prompt": prompt, "greedy": ids[len(prompt):],
        "greedy_gaps": [round(g, 6) for g in gaps], "positions": positions, "logits_file": name + ".f32",
        "rope_inv_freq": [float(f) for f in rotary.inv_freq], "rope_attention_factor": float(rotary.attention_scaling),
        "made_with": f"seed {seed}, torch {torch.__version__}, transformers {transformers.__version__}"}
    with open(base + ".json", "w", encoding="utf-8") as f:
        json.dump(golden, f)
        f.write("\n")
    print(f"{name}: seed {seed}, smallest gap {min(gaps):.3f}, largest logit {np.abs(logits).max():.2f}, "
          f"distinct greedy ids {len(set(ids[len(prompt):]))}", flush=True)


def make(name):
    for seed in range(1, 1000):
        model = load(write_model(name, seed))
        prompt = prompt_of(name, seed)
        ids, gaps = greedy(model, prompt)
        if min(gaps) >= GAP_MIN and len(set(ids[len(prompt):])) >= 8:
            return write_golden(name, seed, model, prompt, ids, gaps)
    raise RuntimeError(f"{name}: no seed with gaps of {GAP_MIN}")


def main():
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    for name in sys.argv[1:] or MODELS:
        make(name)


if __name__ == "__main__":
    main()
