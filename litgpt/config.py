# Licensed under the Apache License 2.0, see the LICENSE file.

"""The model description: every architectural choice as one flat dataclass, free of torch."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from litgpt.errors import MissingFileError, UserError

if TYPE_CHECKING:
    from typing_extensions import Self

MoERouter = Literal["topk_softmax", "softmax_topk", "sigmoid"]


def find_multiple(n: int, k: int) -> int:
    """Return the smallest multiple of `k` that is not below `n`."""
    assert k > 0
    return -(-n // k) * k


@dataclass
class Config:
    """Architecture of one model.

    Field names up to `rope_indices` are LitGPT's; the ones after it state explicitly what LitGPT infers from the name
    of a model. Sizes are counts of elements, windows and lengths are counts of tokens.

    Raises:
        ValueError: fields that contradict each other; the message carries the numbers.
    """

    name: str = ""
    hf_config: dict[str, Any] = field(default_factory=dict)
    # Sizes
    block_size: int = 4096
    n_layer: int = 16
    n_embd: int = 4096
    vocab_size: int = 50254
    padding_multiple: int = 512
    padded_vocab_size: int | None = None
    # Block: structure and norms
    norm_class_name: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    norm_eps: float = 1e-5
    norm_qk: bool = False
    norm_qk_type: Literal["default", "olmo2", "each_head"] = "default"  # by head | full width | by head, own weights
    post_attention_norm: bool = False
    post_mlp_norm: bool = False
    parallel_residual: bool = True
    shared_attention_norm: bool = False
    # Attention
    n_head: int = 32
    head_size: int | None = None
    n_query_groups: int | None = None
    attn_bias: bool = False
    attention_scores_scalar: float | None = None
    sliding_window_size: int | None = None
    sliding_window_indices: list[int] | None = None  # per layer: 1 = sliding, 0 = global
    attention_logit_softcapping: float | None = None
    # Rotary embedding
    rope_base: float = 10000
    rotary_percentage: float = 0.25
    rope_condense_ratio: float = 1
    rope_adjustments: dict[str, Any] | None = None
    rope_interleave: bool = False
    # MLP
    intermediate_size: int | None = None
    moe_intermediate_size: int | None = None
    bias: bool = True
    mlp_class_name: Literal["GptNeoxMLP", "LLaMAMLP", "GemmaMLP", "LLaMAMoE"] = "GptNeoxMLP"
    gelu_approximate: str = "none"
    n_expert: int = 0
    n_shared_expert: int | None = None
    n_expert_groups: int | None = None
    n_topk_groups: int | None = None
    n_topk_scores_per_group: int | None = None
    n_expert_per_token: int = 0
    first_k_dense_replace: int | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = False
    # Before and after the blocks
    scale_embeddings: bool = False
    lm_head_bias: bool = False
    final_logit_softcapping: float | None = None
    norm_1: bool = True
    norm_2: bool = True
    latent_attention: dict[str, Any] | None = None
    rope_local_base_freq: float | None = None
    rope_indices: list[int] | None = None  # per layer: 0 = rope_base, 1 = rope_local_base_freq, -1 = no rotation

    # Explicit where LitGPT guesses from the name
    family: str | None = None  # the row of the key tables, named as Hugging Face's `model_type`
    prompt_style: str | None = None  # named style for checkpoints without a chat template
    tie_embeddings: bool = False  # `lm_head.weight` is `transformer.wte.weight`
    norm_unit_offset: bool = False  # norms multiply by (1 + weight)
    norm_affine: bool = True  # LayerNorm has a weight
    norm_bias: bool = True  # LayerNorm has a bias (only with `norm_affine`)
    attn_proj_bias: bool | None = None  # None: as `bias`
    mlp_bias: bool | None = None  # None: as `bias`
    clip_qkv: float | None = None  # queries, keys and values are clamped to it before they are rotated
    query_growth: float | None = None  # at position p queries count 1 + it * ln(1 + p // original_max_seq_len)
    learned_positions: bool = False  # an embedding of the position is added to that of the token: `transformer.wpe`
    attention_sinks: bool = False  # one learned extra logit a head takes part in the softmax
    attention_multiplier: float | None = (
        None  # scale of the scores; None: attention_scores_scalar or head size, ** -0.5
    )
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    mlp_activation: Literal["gelu", "relu2"] = "gelu"  # of a GptNeoxMLP; relu2 is the square of ReLU
    moe_router: MoERouter | None = None  # None: "sigmoid" with expert groups, else "topk_softmax", as LitGPT does
    moe_router_bias: bool = False
    moe_correction_bias: bool = False  # added to the scores for choosing experts, never for weighing them
    moe_indices: list[int] | None = None  # per layer: 1 = MoE, 0 = dense; None: all after `first_k_dense_replace`
    swiglu_limit: float | None = None  # gate and up are clamped to it, gate * sigmoid(1.702 * gate) * (up + 1)

    def __post_init__(self) -> None:
        self.name = self.name or str(self.hf_config.get("name", ""))
        if self.head_size is None:
            if self.n_head < 1 or self.n_embd % self.n_head:
                raise ValueError(f"n_embd {self.n_embd} is not a multiple of n_head {self.n_head}: give head_size")
            self.head_size = self.n_embd // self.n_head
        if self.padded_vocab_size is None:
            self.padded_vocab_size = find_multiple(self.vocab_size, self.padding_multiple)
        else:
            self.vocab_size = min(self.vocab_size, self.padded_vocab_size)
        if self.n_query_groups is None:
            self.n_query_groups = self.n_head
        if self.n_query_groups < 1 or self.n_head % self.n_query_groups:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_query_groups {self.n_query_groups}")
        if self.intermediate_size is None:
            if self.mlp_class_name == "LLaMAMLP":
                raise ValueError(f"config {self.name!r} needs intermediate_size: a LLaMAMLP has no default for it")
            self.intermediate_size = 4 * self.n_embd
        self.rope_n_elem = int(self.rotary_percentage * self.head_size)
        if self.sliding_window_size is not None:
            self.sliding_window_indices = self._per_layer("sliding_window_indices", 1)
        if self.rope_local_base_freq is not None or self.rope_indices is not None:
            default = 1 if self.rope_local_base_freq is not None else 0
            self.rope_indices = self._per_layer("rope_indices", default)
        if self.moe_indices is not None:
            self.moe_indices = self._per_layer("moe_indices", 1)
        if self.latent_attention is not None:
            self._read_latent_attention(self.latent_attention)
        if self.mlp_class_name == "LLaMAMoE":
            self._check_moe()

    def _per_layer(self, name: str, default: int) -> list[int]:
        """The field `name` as one entry a layer; a longer list keeps its beginning, as LitGPT allows."""
        values = getattr(self, name)
        if values is None:
            return [default] * self.n_layer
        if len(values) < self.n_layer:
            raise ValueError(f"{name} has {len(values)} entries for {self.n_layer} layers")
        allowed = (-1, 0, 1) if name == "rope_indices" else (0, 1)
        values = [int(v) for v in values[: self.n_layer]]
        if any(v not in allowed for v in values):
            raise ValueError(f"{name} must hold only {allowed}, got {sorted(set(values))}")
        return values

    def _read_latent_attention(self, latent: dict[str, Any]) -> None:
        needed = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        if missing := [key for key in needed if not latent.get(key)]:
            raise ValueError(f"latent_attention lacks {', '.join(missing)}")
        if self.n_head != self.n_query_groups:
            raise ValueError(f"latent attention needs n_query_groups {self.n_query_groups} == n_head {self.n_head}")
        self.q_lora_rank: int | None = latent.get("q_lora_rank")
        self.kv_lora_rank: int = latent["kv_lora_rank"]
        self.qk_rope_head_dim: int = latent["qk_rope_head_dim"]
        self.qk_nope_head_dim: int = latent["qk_nope_head_dim"]
        self.v_head_dim: int = latent["v_head_dim"]
        self.qk_head_dim = self.qk_rope_head_dim + self.qk_nope_head_dim
        self.rope_n_elem = self.qk_rope_head_dim

    def _check_moe(self) -> None:
        if self.moe_intermediate_size is None:
            self.moe_intermediate_size = self.intermediate_size
        if not 0 < self.n_expert_per_token <= self.n_expert:
            raise ValueError(f"n_expert_per_token {self.n_expert_per_token} must be in 1..n_expert {self.n_expert}")
        if self.n_expert_groups is not None:
            if self.n_expert_groups < 1 or self.n_expert % self.n_expert_groups:
                raise ValueError(
                    f"n_expert {self.n_expert} is not a multiple of n_expert_groups {self.n_expert_groups}"
                )
            if self.n_topk_groups is None or not 0 < self.n_topk_groups <= self.n_expert_groups:
                raise ValueError(f"n_topk_groups {self.n_topk_groups} must be in 1..{self.n_expert_groups}")
            per_group = self.n_expert // self.n_expert_groups
            scores = 2 if self.n_topk_scores_per_group is None else self.n_topk_scores_per_group  # as LitGPT assumes
            if not 0 < scores <= per_group:
                raise ValueError(
                    f"n_topk_scores_per_group {scores} must be in 1..{per_group}: "
                    f"{self.n_expert_groups} groups of {self.n_expert} experts have {per_group} each"
                )
        if self.moe_router is None:
            self.moe_router = "sigmoid" if self.n_expert_groups else "topk_softmax"

    # Where a config comes from and goes to

    @classmethod
    def from_name(cls, name: str, **kwargs: Any) -> Self:
        """A model known by name.

        Args:
            name: LitGPT's name, the name on the Hugging Face hub, or `organisation/name`.
            kwargs: fields that win over the known ones.

        Raises:
            ValueError: unknown name; the message has the most similar ones.
        """
        from litgpt.families.registry import lookup

        return cls(**(lookup(name) | kwargs))

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, **kwargs: Any) -> Self:
        """Read Hugging Face's `config.json`.

        A model known by name keeps its `hf_config` and `prompt_style`; everything else is the file's.

        Args:
            source: the parsed file, the file, or the folder it is in.
            kwargs: fields that win over the file.

        Raises:
            UserError: the file is missing, damaged, of an unknown `model_type`, or says something unknown.
        """
        from litgpt.families.from_hf import read_config
        from litgpt.families.registry import find

        fields = read_config(source)
        if not isinstance(source, Mapping):
            path = Path(source).resolve()
            fields["name"] = (path if path.is_dir() else path.parent).name
        known = find(kwargs.get("name") or fields.get("name", "")) or {}
        fields |= {key: known[key] for key in ("name", "hf_config", "prompt_style") if key in known}
        try:
            return cls(**(copy.deepcopy(fields) | kwargs))
        except ValueError as error:
            raise UserError(f"config.json of type {fields['family']!r} contradicts itself: {error}") from error

    @classmethod
    def from_file(cls, path: str | Path, **kwargs: Any) -> Self:
        """Read a `model_config.yaml`, LitGPT's or ours.

        Args:
            path: the file.
            kwargs: fields that win over the file.

        Raises:
            UserError: the file is missing, damaged, or has unknown keys.
        """
        fields = _read_yaml(Path(path))
        declared = {f.name: str(f.type) for f in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - set(declared)):
            raise UserError(f"{path} has unknown keys: {', '.join(unknown)}", "are they spelled as in Config?")
        try:
            fields = {key: _checked(key, value, declared[key]) for key, value in fields.items()}
            implied = _implied(fields)
            hub = {key: value for key, value in fields.get("hf_config", {}).items() if key not in IN_HF_CONFIG}
            return cls(**(implied | fields | {"hf_config": hub} | kwargs))
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: {error}") from error

    @classmethod
    def from_checkpoint(cls, path: str | Path, **kwargs: Any) -> Self:
        """Read the config of a checkpoint.

        Args:
            path: a folder with `model_config.yaml` or `config.json`, a folder named like a known model, a `.gguf` file,
                or one of the two config files itself.
            kwargs: fields that win over the checkpoint's.

        Raises:
            UserError: there is no config, or it cannot be read. A missing one is a `FileNotFoundError` too.
        """
        path = Path(path)
        if path.suffix == ".gguf" and path.is_file():
            from litgpt.checkpoint.gguf import GGUFFile

            file = GGUFFile(path)
            return cls.from_hf(file.hf_config(), **({"name": file.name} | kwargs))
        if path.suffix == ".json":
            return cls.from_hf(path, **kwargs)
        if path.suffix in (".yaml", ".yml"):
            return cls.from_file(path, **kwargs)
        if (path / "model_config.yaml").is_file():
            return cls.from_file(path / "model_config.yaml", **kwargs)
        if (path / "config.json").is_file():
            from litgpt.checkpoint.dequantize import read_config

            return read_config(path, cls, **kwargs)  # of fp8 and mxfp4 too
        from litgpt.families.registry import find

        if path.is_dir() and find(path.name) is not None:
            return cls.from_name(path.name, **kwargs)
        reason = "holds neither model_config.yaml nor config.json" if path.is_dir() else "does not exist"
        raise MissingFileError(f"{str(path)!r} {reason}", "give a checkpoint folder or a .gguf file")

    def save(self, path: str | Path) -> None:
        """Write `model_config.yaml` so that LitGPT 0.5.13 reads it: what the name implies is left out.

        Args:
            path: the file, or the folder to put it in.
        """
        path = Path(path)
        path = path / "model_config.yaml" if path.is_dir() else path
        values = {f.name: copy.deepcopy(getattr(self, f.name)) for f in dataclasses.fields(Config)}
        fields = {name: value for name, value in values.items() if name not in EXPLICIT}
        implied = {name: _DEFAULTS[name] for name in EXPLICIT} | _implied(fields)
        for name in EXPLICIT:
            if values[name] != implied[name]:
                place = fields["hf_config"] if name in IN_HF_CONFIG else fields
                place[name] = values[name]
        temporary = path.with_name(path.name + ".tmp")  # a file that exists is a whole one
        temporary.write_text(yaml.safe_dump(fields), encoding="utf-8")
        os.replace(temporary, path)

    # What a layer is made of

    def layer_window(self, block_idx: int) -> int | None:
        """Sliding window of a layer in tokens, None for global attention."""
        if self.sliding_window_size is None or self.sliding_window_indices is None:
            return None
        return self.sliding_window_size if self.sliding_window_indices[block_idx] else None

    def layer_rope(self, block_idx: int) -> int:
        """Which rotary table a layer uses: 0 global, 1 local, -1 none."""
        return 0 if self.rope_indices is None else self.rope_indices[block_idx]

    def layer_is_moe(self, block_idx: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        if self.mlp_class_name != "LLaMAMoE":
            return False
        if self.moe_indices is not None:
            return bool(self.moe_indices[block_idx])
        return block_idx >= (self.first_k_dense_replace or 0)

    @property
    def attention_scale(self) -> float:
        """Factor on the attention scores before softcap and softmax."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        if self.latent_attention is not None:
            return self.qk_head_dim**-0.5
        size = self.attention_scores_scalar or self.head_size
        assert size is not None
        return size**-0.5

    @property
    def mlp_class(self) -> type:
        """The MLP class of `litgpt.model` that `mlp_class_name` names."""
        import litgpt.model

        return getattr(litgpt.model, self.mlp_class_name)

    @property
    def norm_class(self) -> Any:
        """A callable `(size, eps=...) -> nn.Module` for this model's norms."""
        from functools import partial

        import litgpt.layers

        return partial(litgpt.layers.build_norm, self)


_FIELDS = dataclasses.fields(Config)
_DEFAULTS = {f.name: f.default for f in _FIELDS}
# The fields that LitGPT does not have; its files leave them to the model's name.
EXPLICIT = tuple(f.name for f in _FIELDS[[f.name for f in _FIELDS].index("family") :])


# Those that LitGPT can do without go where it tolerates other keys.
IN_HF_CONFIG = ("family", "prompt_style", "tie_embeddings")


def _implied(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a `model_config.yaml` says, or its name implies, about the fields that LitGPT does not have."""
    from litgpt.families.registry import find, guess_family

    hub = fields.get("hf_config") or {}
    known = find(fields.get("name", "")) or find(str(hub.get("name", ""))) or guess_family(fields)
    implied = {name: copy.deepcopy(known[name]) for name in EXPLICIT if name in known}
    return implied | {name: hub[name] for name in IN_HF_CONFIG if name in hub}


def _checked(name: str, value: Any, declared: str) -> Any:
    """`value` if it is what the field was declared as; YAML 1.1 reads `1e-6` as a string, so that is a number too."""
    if value is None and "None" in declared:
        return None
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    kinds |= {"list": (list,), "dict": (dict,), "Literal": (str,), "MoERouter": (str,)}
    kind = declared.split("[")[0].split(" ")[0]
    if kind == "float" and isinstance(value, str):
        value = float(value)
    if kind in kinds and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "bool")):
        raise ValueError(f"{name} is {value!r}, expected {declared}")
    return value


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} does not exist") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(fields, dict) or not all(isinstance(key, str) for key in fields):
        raise UserError(f"{path} holds no fields of a config")
    return fields


def __getattr__(name: str) -> Any:
    """`configs` and `name_to_config`: the models known by name, built when first asked for."""
    if name in ("configs", "name_to_config"):
        from litgpt.families import registry

        return getattr(registry, name)()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
