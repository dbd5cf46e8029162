"""Names and shapes of a decoder's tensors (Qwen3, Qwen2, Llama) as Hugging Face and GGUF files call them."""

# (Hugging Face name, GGUF name, shape in the letters of a config); layer names get their prefix below.
_LAYER = [
    ("input_layernorm.weight", "attn_norm.weight", "E"),
    ("self_attn.q_proj.weight", "attn_q.weight", "QE"),
    ("self_attn.q_proj.bias", "attn_q.bias", "Q"),
    ("self_attn.k_proj.weight", "attn_k.weight", "KE"),
    ("self_attn.k_proj.bias", "attn_k.bias", "K"),
    ("self_attn.v_proj.weight", "attn_v.weight", "KE"),
    ("self_attn.v_proj.bias", "attn_v.bias", "K"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight", "D"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight", "D"),
    ("self_attn.o_proj.weight", "attn_output.weight", "EQ"),
    ("post_attention_layernorm.weight", "ffn_norm.weight", "E"),
    ("mlp.gate_proj.weight", "ffn_gate.weight", "FE"),
    ("mlp.up_proj.weight", "ffn_up.weight", "FE"),
    ("mlp.down_proj.weight", "ffn_down.weight", "EF"),
]


def decoder_spec(config):
    """List of (Hugging Face name, GGUF name, shape) in file order, from a config.json object."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    size = {"V": config["vocab_size"], "E": config["hidden_size"], "F": config["intermediate_size"], "D": head_dim,
            "Q": heads * head_dim, "K": config["num_key_value_heads"] * head_dim}
    kind = config["model_type"]

    def in_use(name):
        if name.endswith(".bias"):
            return kind == "qwen2"
        return kind == "qwen3" or not name.endswith(("q_norm.weight", "k_norm.weight"))

    spec = [("model.embed_tokens.weight", "token_embd.weight", "VE")]
    for i in range(config["num_hidden_layers"]):
        spec += [(f"model.layers.{i}.{hf}", f"blk.{i}.{gguf}", shape) for hf, gguf, shape in _LAYER if in_use(hf)]
    spec.append(("model.norm.weight", "output_norm.weight", "E"))
    if not config["tie_word_embeddings"]:
        spec.append(("lm_head.weight", "output.weight", "VE"))
    return [(hf, gguf, tuple(size[letter] for letter in shape)) for hf, gguf, shape in spec]
