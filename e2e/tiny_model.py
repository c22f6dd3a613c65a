#!/usr/bin/env python3
"""Makes a tiny Llama with random weights, and a tokenizer that gives one token a byte. No download.

    python e2e/tiny_model.py DIR [--fat] [--seed N]

The weights come from a fixed seed, so that every machine gets the same model. With --fat the cache weighs something:
8 layers of 8 KV heads of 128 are 32 KiB a token in bfloat16, and twice that in float32.
A directory that holds the same model already is left as it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

# Raise it when the model changes, so that a directory with the older one is made again.
RECIPE = 4

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def shape(fat: bool) -> dict[str, int]:
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


def make_model(target: Path, fat: bool, seed: int, vocabulary: int, printable: list[int]) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=-(-vocabulary // 64) * 64,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        # Wide enough that attention, and with it the cache, decides the next token: with the usual 0.02 a model of
        # this size answers nearly the same whatever stands in the cache, and a test of the cache would prove little.
        initializer_range=0.08,
        **shape(fat),
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
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


def make(target: Path, fat: bool = False, seed: int = 7) -> Path:
    """Makes the model in target unless it is there; returns target."""
    stamp = {"recipe": RECIPE, "fat": fat, "seed": seed, **shape(fat)}
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
        make_model(built, fat, seed, *make_tokenizer(built))
        (built / file.name).write_text(json.dumps(stamp), encoding="utf-8")
        if target.exists():
            if not file.exists() and any(target.iterdir()):
                raise SystemExit(f"{target} is not empty and was not made by {Path(__file__).name}; name another place")
            shutil.rmtree(target)
        built.replace(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--fat", action="store_true", help="a cache of 32 KiB a token instead of 2 KiB (in bfloat16)")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    print(make(args.directory.absolute(), args.fat, args.seed), file=sys.stdout)


if __name__ == "__main__":
    main()
