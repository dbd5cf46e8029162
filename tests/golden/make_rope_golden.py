#!/usr/bin/env python3
"""Writes rope.json: RoPE configs with the inverse frequencies and attention factors that transformers computes.

  .cache/golden-venv/bin/python tests/golden/make_rope_golden.py      (set up as in make_logits_golden.py)
"""
import json
import os

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CASES = [
    # theta, head dim, max positions, rope_scaling
    (10000.0, 64, 2048, None),
    (1e6, 128, 40960, None),
    (5e5, 128, 4096, {"rope_type": "linear", "factor": 2.5}),
    (10000.0, 64, 2048, {"type": "linear", "factor": 4.0}),
    (1e6, 128, 40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    (1e6, 128, 32768, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    (1e6, 128, 32768, {"rope_type": "yarn", "factor": 2.0}),
    (10000.0, 64, 4096, {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 256,
                         "attention_factor": 0.75}),
    (10000.0, 64, 4096, {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
                         "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16, "beta_slow": 2}),
    (150000.0, 64, 131072, {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                            "truncate": False}),
    (1.5e4, 64, 128, {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64}),
]


def expected(theta, head_dim, context, scaling):
    config = transformers.Qwen3Config(head_dim=head_dim, rope_theta=theta, max_position_embeddings=context,
                                      rope_scaling=dict(scaling) if scaling else None)
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type"))
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return [float(f) for f in inv_freq], float(factor)


def main():
    out = []
    for theta, head_dim, context, scaling in CASES:
        inv_freq, factor = expected(theta, head_dim, context, scaling)
        old = {"rope_theta": theta, "rope_scaling": scaling}
        new = {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **(scaling or {})}}
        if scaling and "type" in scaling:
            new["rope_parameters"]["rope_type"] = scaling["type"]
        for spelling in (old, new):
            out.append({"config": {**spelling, "head_dim": head_dim, "max_position_embeddings": context},
                        "inv_freq": inv_freq, "attention_factor": factor})
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rope.json")
    with open(path, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(case) for case in out) + "\n]\n")


if __name__ == "__main__":
    main()
