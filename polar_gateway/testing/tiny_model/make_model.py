"""Make a tiny Qwen3 with random weights, the repository's tokenizer and its chat template.

    python make_model.py OUT [SEED]

Runs where vLLM is installed (torch, transformers). The weights are seeded: the same versions make
the same model, 2.5 MB of it.
"""

import sys
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

HERE = Path(__file__).parent
SEED = 20_240_607
CONTEXT = 131_072


def make(out: Path, seed: int) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "tokenizer.json"),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text("utf-8")
    tokenizer.save_pretrained(out)

    if len(tokenizer) % 64:
        raise ValueError("vLLM pads the vocabulary to a multiple of 64 with ids that are no token")
    end_of_turn, end_of_text = tokenizer.eos_token_id, tokenizer.pad_token_id
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.2,  # the usual 0.02 would make every token about as likely as any other
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        bos_token_id=None,
        dtype="float32",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    model = Qwen3ForCausalLM(config).to(torch.float32).eval()
    model.generation_config = GenerationConfig(
        eos_token_id=[end_of_turn, end_of_text],  # two, as Qwen3 has
        pad_token_id=end_of_text,
        do_sample=True,
        temperature=1.0,
    )
    model.save_pretrained(out)


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else SEED)
