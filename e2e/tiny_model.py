#!/usr/bin/env python3
"""Makes a tiny model with random weights, and a tokenizer that gives one token a byte. No download.

    python e2e/tiny_model.py DIR [--kind KIND] [--fat] [--layers N] [--seed N]

A Llama (grouped queries), a DeepSeek (MLA: one latent vector a token), or a Gemma 3 (five layers of six attend to a
window of 128 tokens, which makes a KV cache group of its own), or a Qwen 3 (as the Llama, but SGLang can give it attention
data parallel ranks). With states: a Granite 4 and a Falcon-H1 (Mamba 2 layers beside attention, in other layers or in the same
ones), a Mamba 2 (no attention), an LFM2 (short convolutions), a Qwen3-Next (gated delta nets). The weights come from a fixed
seed, so that every machine gets the same model. With --fat the Llama's cache weighs something: 8 layers of 8 KV heads of
128 are 32 KiB a token in bfloat16, and twice that in float32.
A directory that holds the same model already is left as it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

# Raise it when the model changes, so that a directory with the older one is made again.
RECIPE = 5
# Of the fat Llama: with so many its cache has 32 KiB a token. A processor without bfloat16 computes it some fifty times slower.
FAT_LAYERS = {"float32": 4, "bfloat16": 8}
STATES = ("granite", "falcon", "mamba2", "lfm2", "delta")
KINDS = ("llama", "mla", "window", "qwen", *STATES)
WINDOW = 128

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


_SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1}
_OF_STATES: dict[str, dict[str, Any]] = {
    "granite": {
        **_SMALL,
        **_MAMBA,
        "num_hidden_layers": 6,
        "shared_intermediate_size": 256,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "layer_types": ["mamba", "mamba", "attention"] * 2,  # two groups of states beside that of attention
        "mamba_expand": 2,
        "attention_multiplier": 0.1767,
        "position_embedding_type": "rope",
    },
    "falcon": {**_SMALL, **_MAMBA, "num_hidden_layers": 4, "head_dim": 32, "mamba_d_ssm": 256},
    "mamba2": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "state_size": 32,
        "num_heads": 8,
        "head_dim": 32,
        "n_groups": 1,
        "chunk_size": 64,
    },
    "lfm2": {
        **_SMALL,
        "num_hidden_layers": 4,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
        "conv_dim": 128,
        "block_dim": 128,
    },
    "delta": {
        **_SMALL,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}


def shape(kind: str, fat: bool) -> dict[str, Any]:
    if kind in _OF_STATES:
        return _OF_STATES[kind]
    if kind == "mla":
        return {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 3,  # no layer of experts
            "kv_lora_rank": 512,
            "q_lora_rank": 128,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        }
    if kind == "window":
        return {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "sliding_window": WINDOW,
        }
    if fat:
        return {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 128,
        }
    return {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    }


def make_tokenizer(target: Path) -> tuple[int, list[int]]:
    """A byte-level BPE without a single merge: a token a byte. Returns its size, and the tokens of printable ASCII."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|bos|>", "<|eos|>", "<|pad|>"]
    vocabulary = {token: number for number, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(target))
    printable = [vocabulary[char] for char in map(chr, range(0x21, 0x7F))] + [vocabulary["\u0120"]]  # Ġ is the space
    return len(vocabulary), printable


def make_model(target: Path, kind: str, shape: dict[str, Any], seed: int, vocabulary: int, printable: list[int]) -> None:
    import torch
    import transformers

    family = {
        **{"llama": "Llama", "mla": "DeepseekV2", "window": "Gemma3", "qwen": "Qwen3"},
        **{"granite": "GraniteMoeHybrid", "falcon": "FalconH1", "mamba2": "Mamba2", "lfm2": "Lfm2", "delta": "Qwen3Next"},
    }[kind]
    make_config = getattr(transformers, f"{family}TextConfig" if kind == "window" else f"{family}Config")
    config = make_config(
        vocab_size=-(-vocabulary // 64) * 64,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=kind in ("window", "lfm2"),  # vLLM has no other Gemma, and no other LFM2
        # Wide enough that attention, and with it the cache, decides the next token: with the usual 0.02 a model of
        # this size answers nearly the same whatever stands in the cache, and a test of the cache would prove little.
        initializer_range=0.08,
        **shape,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    if kind in STATES:
        # What decides how long a state remembers stays as its model has it at first. The rest is wide enough that the whole
        # prompt decides the next token.
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1 and not any(part in name for part in ("A_log", "conv", ".norm")):
                    weight.normal_(0, 0.12)
    model = model.to(torch.bfloat16)
    # A row of zeros gives a logit of 0, which never is the largest of some ninety: only what can be printed is answered,
    # and a text ends by its length (or by a logit_bias).
    with torch.no_grad():
        silent = torch.ones(model.lm_head.weight.shape[0], dtype=torch.bool)
        silent[printable] = False
        model.lm_head.weight[silent] = 0
    # The padding of the vocabulary and the special tokens are never the answer.
    with torch.no_grad():
        head = model.lm_head.weight
        head[:3] = 0
        head[vocabulary:] = 0
    model.save_pretrained(str(target))


def make(target: Path, fat: bool = False, seed: int = 7, kind: str = "llama", layers: int | None = None) -> Path:
    """Makes the model in target unless it is there; returns target."""
    sizes = {**shape(kind, fat), **({"num_hidden_layers": layers} if layers is not None else {})}
    stamp = {"recipe": RECIPE, "kind": kind, "fat": fat, "seed": seed, **sizes}
    file = target / "kvconn-e2e.json"
    try:
        if json.loads(file.read_text(encoding="utf-8")) == stamp and (target / "config.json").exists():
            return target
    except (OSError, ValueError):
        pass
    target.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its place and moved there whole: an interrupted run leaves nothing that looks like a model.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as part:
        built = Path(part) / "model"
        built.mkdir()
        make_model(built, kind, sizes, seed, *make_tokenizer(built))
        (built / file.name).write_text(json.dumps(stamp), encoding="utf-8")
        if target.exists():
            if not file.exists() and any(target.iterdir()):
                raise SystemExit(f"{target} is not empty and was not made by {Path(__file__).name}; name another place")
            shutil.rmtree(target)
        built.replace(target)
    return target


def make_32k(target: Path, dtype: str) -> Path:
    """A model whose cache has 32 KiB a token in this data type."""
    return make(target, fat=True, layers=FAT_LAYERS[dtype])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    parser.add_argument("--fat", action="store_true", help="a cache of 32 KiB a token instead of 2 KiB (in bfloat16)")
    parser.add_argument("--layers", type=int, help="other than its kind has")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    print(make(args.directory.absolute(), args.fat, args.seed, args.kind, args.layers), file=sys.stdout)


if __name__ == "__main__":
    main()
