# Licensed under the Apache License 2.0, see the LICENSE file.

"""Real weights: the same logits and the same greedy text as transformers loading the same GGUF file in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from litgpt.checkpoint.convert import load_model
from litgpt.generate.engine import Engine
from litgpt.generate.types import SamplingParams
from litgpt.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

# transformers takes minutes to read the larger file
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

N_NEW = 64


def long_text() -> str:
    return (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")


def compare_with_transformers(path: Path, prompt: list[int]) -> float:
    """Assert equal greedy continuations; return the largest difference of the prompt's logits."""
    model = load_model(path, dtype=torch.float32)
    result = Engine(model).generate([prompt], SamplingParams(max_new_tokens=N_NEW, temperature=0.0))[0]
    with torch.inference_mode():
        ours = model(torch.tensor([prompt]))
    del model
    reference = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    reference.eval()
    with torch.inference_mode():
        theirs = reference(torch.tensor([prompt])).logits
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=N_NEW, min_new_tokens=N_NEW, do_sample=False, pad_token_id=0
        )
    assert result.token_ids == expected[0, len(prompt) :].tolist()
    return (ours - theirs).abs().max().item()


def test_smollm2_greedy_text_and_logits_equal_transformers(smollm2_gguf: Path) -> None:
    prompt = Tokenizer(smollm2_gguf).encode(
        "<|im_start|>user\nWhat food do llamas eat?<|im_end|>\n<|im_start|>assistant\n"
    )
    difference = compare_with_transformers(smollm2_gguf, prompt.tolist())
    print(f"SmolLM2: largest difference of the logits {difference:.1e}")
    assert difference <= 2e-3


def test_gemma3_past_its_window_equals_transformers(gemma3_gguf: Path) -> None:
    prompt = Tokenizer(gemma3_gguf).encode(long_text())[:620].tolist()
    config = load_model(gemma3_gguf).config
    assert config.sliding_window_size is not None
    assert len(prompt) > config.sliding_window_size  # the rings have wrapped before the first new token
    difference = compare_with_transformers(gemma3_gguf, prompt)
    print(f"Gemma 3 270M: largest difference of the logits {difference:.1e}")
    assert difference <= 2e-3
