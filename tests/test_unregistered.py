# Licensed under the Apache License 2.0, see the LICENSE file.

"""A fine-tune that nobody registered: renamed folder, other sizes, added tokens; `model_type` says how to read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from litgpt.families.registry import find
from litgpt.model import GPT
from tests.tiny import random_ids, randomize, tiny_hf_config, tiny_hf_model

ADDED = 5
FAMILIES = ["llama", "qwen2", "qwen3_moe", "gemma2", "phi3", "gpt_neox", "falcon_40b", "stablelm", "olmo2", "smollm3"]
FAMILIES += ["granite", "gpt2", "cohere2", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_renamed_grown_fine_tune_loads_by_its_type(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": None, "intermediate_size": 44}
    sizes |= {"gpt2": {"n_inner": 44}, "falcon_40b": {"ffn_hidden_size": 44}}.get(name, {})
    theirs = tiny_hf_model(name, seed=4, **sizes)
    vocab_size = theirs.config.vocab_size + ADDED
    theirs.resize_token_embeddings(vocab_size, mean_resizing=False)
    folder = tmp_path / "sarahs-best-model-v7 (final)"
    theirs.save_pretrained(folder)
    assert find(folder.name) is None

    ours = GPT.from_checkpoint(folder)
    config = ours.config
    assert (config.n_layer, config.padded_vocab_size, config.prompt_style) == (4, vocab_size, None)
    assert config.intermediate_size == 44
    ids = random_ids((2, 12), vocab_size=vocab_size)
    ids[0, :ADDED] = torch.arange(vocab_size - ADDED, vocab_size)
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_language_model_of_a_multimodal_one(tmp_path: Path) -> None:
    import transformers

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision = transformers.PixtralVisionConfig(hidden_size=16, intermediate_size=20, **sizes)
    text = tiny_hf_config("ministral3").to_dict()
    config = transformers.Mistral3Config(text_config=text, vision_config=vision.to_dict(), tie_word_embeddings=False)
    theirs = transformers.Mistral3ForConditionalGeneration(config).float().eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_checkpoint(tmp_path)
    assert ours.config.family == "ministral3"
    assert ours.config.query_growth == 0.3
    ids = random_ids((2, 40))
    torch.testing.assert_close(ours(ids), theirs(input_ids=ids).logits, atol=1e-4, rtol=0)
