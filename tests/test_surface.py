# Licensed under the Apache License 2.0, see the LICENSE file.

"""The names, flags and defaults that people who use LitGPT 0.5.13 rely on.

Everything that exists is compared. What does not exist yet is listed in `MISSING_COMMANDS` and `MISSING_NAMES`; a test
fails when something listed exists, so the lists can only shrink. More options and names than these are welcome.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from litgpt.__main__ import COMMANDS

REQUIRED = inspect.Parameter.empty
QUANTIZE = ("bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8")
QUANTIZE_TRAINING = ("bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8-training")


class Args:
    """A dataclass as a default, with the fields that differ from the dataclass's own defaults."""

    def __init__(self, name: str, **fields: Any) -> None:
        self.name, self.fields = name, fields

    def __eq__(self, other: object) -> bool:
        values = {name: getattr(other, name, REQUIRED) for name in self.fields}
        return type(other).__name__ == self.name and values == self.fields

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"


SAMPLING: dict[str, Any] = {"top_k": 50, "top_p": 1.0, "temperature": 0.8}
GENERATE: dict[str, Any] = {
    "checkpoint_dir": REQUIRED,
    "prompt": "What food do llamas eat?",
    "sys_prompt": None,
    "num_samples": 1,
    "max_new_tokens": 50,
    **SAMPLING,
    "quantize": None,
    "precision": None,
    "compile": False,
}
GENERATE_FINETUNED: dict[str, Any] = {
    "checkpoint_dir": REQUIRED,
    "prompt": "What food do llamas eat?",
    "input": "",
    "sys_prompt": None,
    "quantize": None,
    "max_new_tokens": 100,
    **SAMPLING,
    "precision": None,
}
TRAIN: dict[str, Any] = {
    "save_interval": 1000,
    "log_interval": 1,
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "lr_warmup_steps": 100,
    "epochs": 5,
    "max_seq_length": None,
}
FINETUNE: dict[str, Any] = {
    "checkpoint_dir": REQUIRED,
    "precision": None,
    "devices": 1,
    "num_nodes": 1,
    "data": None,
    "train": Args("TrainArgs", **TRAIN),
    "eval": Args("EvalArgs", interval=100, max_new_tokens=100, max_iters=100),
    "log": Args("LogArgs"),
    "optimizer": "AdamW",
    "logger_name": "csv",
    "seed": 1337,
    "access_token": None,
}
FINETUNE_LORA: dict[str, Any] = {
    **FINETUNE,
    "out_dir": Path("out/finetune/lora"),
    "quantize": None,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_query": True,
    "lora_key": False,
    "lora_value": True,
    "lora_projection": False,
    "lora_mlp": False,
    "lora_head": False,
    "train": Args("TrainArgs", **TRAIN, max_time=None),
}

# Command -> (function, parameter -> default). The default of every access_token is $HF_TOKEN, read when it is used, so
# that no help text or saved configuration can hold it.
SURFACE: dict[str, tuple[str, dict[str, Any]]] = {
    "download": (
        "litgpt.scripts.download:download_from_hub",
        {
            "repo_id": REQUIRED,
            "access_token": None,
            "tokenizer_only": False,
            "convert_checkpoint": True,
            "dtype": None,
            "checkpoint_dir": Path("checkpoints"),
            "model_name": None,
        },
    ),
    "chat": (
        "litgpt.chat.base:main",
        {
            "checkpoint_dir": REQUIRED,
            "max_new_tokens": 50,
            **SAMPLING,
            "quantize": None,
            "precision": None,
            "compile": False,
            "multiline": False,
            "access_token": None,
        },
    ),
    "finetune": ("litgpt.finetune.lora:setup", FINETUNE_LORA),
    "finetune_lora": ("litgpt.finetune.lora:setup", FINETUNE_LORA),
    "finetune_full": (
        "litgpt.finetune.full:setup",
        {
            **FINETUNE,
            "out_dir": Path("out/finetune/full"),
            "resume": False,
            "eval": Args("EvalArgs", interval=600, max_new_tokens=100, max_iters=100),
        },
    ),
    "finetune_adapter": (
        "litgpt.finetune.adapter:setup",
        {**FINETUNE, "out_dir": Path("out/finetune/adapter"), "quantize": None},
    ),
    "finetune_adapter_v2": (
        "litgpt.finetune.adapter_v2:setup",
        {**FINETUNE, "out_dir": Path("out/finetune/adapter-v2"), "quantize": None, "resume": False},
    ),
    "pretrain": (
        "litgpt.pretrain:setup",
        {
            "model_name": REQUIRED,
            "model_config": None,
            "out_dir": Path("out/pretrain"),
            "precision": None,
            "initial_checkpoint_dir": None,
            "resume": False,
            "data": None,
            "train": Args(
                "TrainArgs",
                save_interval=1000,
                log_interval=1,
                global_batch_size=512,
                micro_batch_size=4,
                max_tokens=3_000_000_000_000,
                max_norm=1.0,
                min_lr=4e-5,
                lr_warmup_steps=2000,
                tie_embeddings=False,
            ),
            "eval": Args("EvalArgs", interval=1000, max_iters=100),
            "log": Args("LogArgs"),
            "optimizer": "AdamW",
            "devices": "auto",
            "num_nodes": 1,
            "tokenizer_dir": None,
            "logger_name": "tensorboard",
            "seed": 42,
        },
    ),
    "generate": ("litgpt.generate.base:main", GENERATE),
    "generate_full": (
        "litgpt.generate.full:main",
        {**GENERATE_FINETUNED, "finetuned_path": Path("out/full/alpaca/lit_model_finetuned.pth")},
    ),
    "generate_adapter": (
        "litgpt.generate.adapter:main",
        {**GENERATE_FINETUNED, "adapter_path": Path("out/finetune/adapter/final/lit_model.pth.adapter")},
    ),
    "generate_adapter_v2": (
        "litgpt.generate.adapter_v2:main",
        {**GENERATE_FINETUNED, "adapter_path": Path("out/finetune/adapter-v2/final/lit_model.pth.adapter_v2")},
    ),
    "generate_sequentially": ("litgpt.generate.sequentially:main", GENERATE),
    "generate_speculatively": (
        "litgpt.generate.speculative_decoding:main",
        {
            "draft_model_checkpoint_dir": REQUIRED,
            "target_model_checkpoint_dir": REQUIRED,
            **{name: default for name, default in GENERATE.items() if name != "checkpoint_dir"},
            "speculative_k": 3,
        },
    ),
    "generate_tp": ("litgpt.generate.tp:main", GENERATE),
    "convert_to_litgpt": (
        "litgpt.scripts.convert_hf_checkpoint:convert_hf_checkpoint",
        {"checkpoint_dir": REQUIRED, "model_name": None, "dtype": None, "debug_mode": False},
    ),
    "convert_from_litgpt": (
        "litgpt.scripts.convert_lit_checkpoint:convert_lit_checkpoint",
        {"checkpoint_dir": REQUIRED, "output_dir": REQUIRED},
    ),
    "convert_pretrained_checkpoint": (
        "litgpt.scripts.convert_pretrained_checkpoint:convert_pretrained_checkpoint",
        {"checkpoint_dir": REQUIRED, "output_dir": REQUIRED},
    ),
    "merge_lora": (
        "litgpt.scripts.merge_lora:merge_lora",
        {"checkpoint_dir": REQUIRED, "pretrained_checkpoint_dir": None, "precision": None},
    ),
    "evaluate": (
        "litgpt.eval.evaluate:convert_and_evaluate",
        {
            "checkpoint_dir": REQUIRED,
            "tasks": None,
            "out_dir": None,
            "force_conversion": False,
            "num_fewshot": None,
            "batch_size": 1,
            "device": None,
            "dtype": None,
            "limit": None,
            "seed": 1234,
            "save_filepath": None,
            "access_token": None,
        },
    ),
    "serve": (
        "litgpt.deploy.serve:run_server",
        {
            "checkpoint_dir": REQUIRED,
            "quantize": None,
            "precision": None,
            **SAMPLING,
            "max_new_tokens": 50,
            "devices": 1,
            "accelerator": "auto",
            "port": 8000,
            "stream": False,
            "openai_spec": False,
            "access_token": None,
            "api_path": "/predict",
            "timeout": 30,
            "generate_strategy": None,
        },
    ),
    "validate": (
        "litgpt.scripts.validate:validate_setup",
        {"checkpoint_dir": REQUIRED, "model_filename": "lit_model.pth", "dtype": "float32", "training": False},
    ),
}

MISSING_COMMANDS = {
    "chat",
    "evaluate",
    "generate_sequentially",
    "generate_tp",
    "pretrain",
    "serve",
}

VARIANT = "GPT Block CausalSelfAttention Config"
# Module -> names that people import from it
NAMES: dict[str, str] = {
    "litgpt": "LLM GPT Config PromptStyle Tokenizer",
    "litgpt.model": "GPT Block CausalSelfAttention MultiheadLatentAttention GptNeoxMLP LLaMAMLP GemmaMLP LLaMAMoE "
    "RMSNorm KVCache apply_rope build_rope_cache build_mask_cache batched_index_select",
    "litgpt.config": "Config configs name_to_config",
    "litgpt.args": "TrainArgs EvalArgs LogArgs",
    "litgpt.lora": f"{VARIANT} LoRALayer LoRALinear LoRAQKVLinear lora_filter mark_only_lora_as_trainable "
    "merge_lora_weights",
    "litgpt.adapter": f"{VARIANT} adapter_filter mark_only_adapter_as_trainable",
    "litgpt.adapter_v2": f"{VARIANT} adapter_filter mark_only_adapter_v2_as_trainable AdapterV2Linear",
    "litgpt.generate.base": "main generate generate_fn batched_generate_fn sample next_token",
    "litgpt.prompts": "PromptStyle save_prompt_style load_prompt_style has_prompt_style",
    "litgpt.tokenizer": "Tokenizer",
    "litgpt.data": "DataModule Alpaca Alpaca2k AlpacaGPT4 Deita FLAN JSON LIMA LongForm LitData OpenWebText TextFiles "
    "TinyLlama MicroLlama TinyStories",
    "litgpt.utils": "chunked_cross_entropy num_parameters load_checkpoint copy_config_files",
}

MISSING_NAMES = {
    *(f"litgpt.data:{name}" for name in ("LitData", "OpenWebText", "TextFiles")),
    *(f"litgpt.data:{name}" for name in ("TinyLlama", "MicroLlama", "TinyStories")),
}

# Class -> method -> parameter -> default
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "litgpt.api:LLM": {
        "load": {
            "model": REQUIRED,
            "init": "pretrained",
            "tokenizer_dir": None,
            "access_token": None,
            "distribute": "auto",
        },
        "distribute": {
            "accelerator": "auto",
            "devices": "auto",
            "precision": None,
            "quantize": None,
            "generate_strategy": None,
            "fixed_kv_cache_size": None,
        },
        "generate": {
            "prompt": REQUIRED,
            "sys_prompt": None,
            "max_new_tokens": 50,
            "temperature": 1.0,
            "top_k": None,
            "top_p": 1.0,
            "return_as_token_ids": False,
            "stream": False,
        },
        "benchmark": {"num_iterations": 1},
        "forward": {"input_ids": REQUIRED, "target_ids": None, "loss_fn": None},
        "save": {"out_dir": REQUIRED, "prompt_style": None},
        "trainer_setup": {"trainer_ckpt": None},
        "state_dict": {},
        "load_state_dict": {"state_dict": REQUIRED},
    },
    "litgpt.model:GPT": {
        "__init__": {"config": REQUIRED},
        "from_name": {"name": REQUIRED},
        "forward": {"idx": REQUIRED, "input_pos": None, "input_pos_maxp1": None, "lm_head_chunk_size": 0},
        "set_kv_cache": {
            "batch_size": REQUIRED,
            "max_seq_length": None,
            "rope_cache_length": None,
            "device": None,
            "dtype": None,
        },
        "clear_kv_cache": {},
        "rope_cache": {},
    },
}


def load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def exists(target: str) -> bool:
    """Whether `"module"` can be imported, or `"module:name"` is in it."""
    module, _, name = target.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("litgpt"):  # a module that needs a missing package is not missing
            raise
        return False
    return not name or hasattr(found, name)


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def assert_contains(function: Callable[..., Any], expected: dict[str, Any]) -> None:
    """The function has these parameters with these defaults, and requires no others."""
    found = defaults(function)
    assert {name: found.get(name, "no such parameter") for name in expected} == expected
    kinds = {name: p.kind for name, p in inspect.signature(function).parameters.items()}
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = {name for name, default in found.items() if default is REQUIRED and kinds[name] not in variable}
    assert required - {"self"} == {name for name, default in expected.items() if default is REQUIRED}


def target_exists(command: str) -> bool:
    return exists(SURFACE[command][0])


@pytest.mark.parametrize("command", sorted(set(SURFACE) - MISSING_COMMANDS))
def test_command(command: str) -> None:
    target, expected = SURFACE[command]
    assert command in COMMANDS
    assert COMMANDS[command].target == target
    assert_contains(load(target), expected)


@pytest.mark.parametrize("command", sorted(set(SURFACE) - MISSING_COMMANDS))
def test_required_parameters_come_first(command: str) -> None:
    function = load(SURFACE[command][0])
    required = [default is REQUIRED for default in defaults(function).values()]
    assert required == sorted(required, reverse=True)


@pytest.mark.parametrize("command", sorted(set(SURFACE) - MISSING_COMMANDS))
def test_quantize_choices(command: str) -> None:
    hints = typing.get_type_hints(load(SURFACE[command][0]))
    if "quantize" in hints:
        literal = next(part for part in typing.get_args(hints["quantize"]) if part is not type(None))
        expected = QUANTIZE_TRAINING if command.startswith("finetune") else QUANTIZE
        assert set(expected) <= set(typing.get_args(literal))


@pytest.mark.parametrize("command", sorted(MISSING_COMMANDS))
def test_missing_command_is_really_missing(command: str) -> None:
    assert command in SURFACE
    assert command not in COMMANDS, f"{command} exists: take it out of MISSING_COMMANDS"
    assert not target_exists(command), f"{SURFACE[command][0]} exists: add {command} to the table of commands"


@pytest.mark.parametrize("module", sorted(set(NAMES) - MISSING_NAMES))
def test_names(module: str) -> None:
    found = importlib.import_module(module)
    expected = {name for name in NAMES[module].split() if f"{module}:{name}" not in MISSING_NAMES}
    assert {name for name in expected if not hasattr(found, name)} == set()


@pytest.mark.parametrize("name", sorted(MISSING_NAMES))
def test_missing_name_is_really_missing(name: str) -> None:
    assert not exists(name), f"{name} exists: take it out of MISSING_NAMES"


@pytest.mark.parametrize("target", sorted(METHODS))
def test_methods(target: str) -> None:
    found = load(target)
    for method, expected in METHODS[target].items():
        assert_contains(getattr(found, method), expected)


def test_properties() -> None:
    from litgpt import LLM

    assert isinstance(inspect.getattr_static(load("litgpt.model:GPT"), "max_seq_length"), property)
    assert hasattr(LLM, "tokenizer")


def test_exports_are_lazy_and_complete() -> None:
    import litgpt

    assert set(NAMES["litgpt"].split()) <= set(dir(litgpt))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        litgpt.nothing  # noqa: B018


def test_version_is_the_project_s() -> None:
    from importlib import metadata

    import litgpt

    try:
        installed = metadata.version("litgpt")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    assert installed == litgpt.__version__
