"""Writes tests/rope_reference.json: rotary tables and factors as the transformers library computes them."""
import json, sys, torch
from transformers import AutoConfig, DeepseekV3Config, LlamaConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding, DeepseekV3Attention
import transformers

base = dict(vocab_size=320, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=131072)
L = lambda scaling, theta=500000.0, **k: ("LlamaForCausalLM", LlamaConfig, LlamaRotaryEmbedding, dict(base, rope_theta=theta, rope_scaling=scaling, **k))
cases = {
 "default": L(None, 10000.0),
 "default_1e6": L(None, 1000000.0, head_dim=64),
 "linear": L(dict(type="linear", factor=4.0), 10000.0),
 "llama3.1": L(dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)),
 "llama3.2": L(dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192), head_dim=64),
 "qwen2.5_yarn": L(dict(type="yarn", factor=4.0, original_max_position_embeddings=32768), 1000000.0),
 "yarn_no_truncate": L(dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=4096, truncate=False, beta_fast=16, beta_slow=2), 10000.0),
 "yarn_given_factor": L(dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=4096, attention_factor=1.25), 10000.0),
}
mla = dict(vocab_size=320, hidden_size=256, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
   q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
   max_position_embeddings=163840, rope_theta=10000.0)
D = lambda scaling: ("DeepseekV3ForCausalLM", DeepseekV3Config, DeepseekV3RotaryEmbedding, dict(mla, rope_scaling=scaling))
cases["deepseek_v3"] = D(dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0))
cases["deepseek_v2_lite"] = D(dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707))
cases["deepseek_unequal"] = D(dict(type="yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=0.707))
out = {"source": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}", "cases": []}
for name, (arch, cls, emb, kw) in cases.items():
    import copy
    config = cls(**copy.deepcopy(kw))
    e = emb(config)
    if arch.startswith("Deepseek"):
        scale = DeepseekV3Attention(config, 0).scaling
    else:
        scale = (config.head_dim or config.hidden_size // config.num_attention_heads) ** -0.5
    doc = {"architectures": [arch], "hidden_act": "silu", **kw}
    out["cases"].append({"name": name, "config": doc, "inv_freq": [float(x) for x in e.inv_freq], "attention_factor": float(e.attention_scaling), "softmax_scale": float(scale)})
json.dump(out, open(sys.argv[1], "w"), indent=None, separators=(",", ":"))
