# Licensed under the Apache License 2.0, see the LICENSE file.

"""The Python API: one object with a model, its tokenizer and its prompt format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from torch import nn

from litgpt.checkpoint.adapter_files import VARIANTS, Adapter, base_and_adapter, open_adapter, plain_weights
from litgpt.checkpoint.hub import resolve
from litgpt.checkpoint.save import FolderWriter
from litgpt.checkpoint.source import LITGPT_FILE, companions, open_source
from litgpt.config import Config
from litgpt.errors import MissingFileError, UserError
from litgpt.generate.engine import Engine, Stream
from litgpt.generate.loading import autocast_dtype, load_weights, with_stops_of
from litgpt.generate.speculative import Speculation
from litgpt.generate.types import Result, SamplingParams, as_stop_strings
from litgpt.kvcache import CacheKind
from litgpt.kvcache.prefix import PrefixStore
from litgpt.model import GPT
from litgpt.prompts import PromptStyle, choose_prompt_style, encode_prompt, has_prompt_style, save_prompt_style
from litgpt.quantize import Quantization, check_quantization, is_quantized, quantize_model
from litgpt.runtime import pick_device, pick_precision, weight_dtype
from litgpt.tokenizer import Tokenizer
from litgpt.train.loss import chunked_cross_entropy

Message = Mapping[str, Any]
LossFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Preprocessor:
    """A tokenizer and the device that its ids go to."""

    def __init__(self, tokenizer: Tokenizer, device: str | torch.device = "cpu") -> None:
        self.tokenizer = tokenizer
        self.device = torch.device(device)

    def encode(self, text: str) -> torch.Tensor:
        """Text to token ids, `(T,)`."""
        return self.tokenizer.encode(text, device=self.device)

    def decode(self, token_ids: torch.Tensor) -> str:
        """Token ids to text."""
        return self.tokenizer.decode(token_ids)


class LLM(nn.Module):
    """A language model to talk to, to measure, to train and to save. Made by `LLM.load`.

    Example:
        >>> llm = LLM.load("HuggingFaceTB/SmolLM2-135M-Instruct")
        >>> text = llm.generate("What do llamas eat?", top_k=1)

    Args:
        model: the model; None until `distribute` or `trainer_setup` loads it.
        preprocessor: the tokenizer and its device.
        prompt_style: how requests are formatted.
        config: the model's architecture.
        checkpoint_dir: where the weights are; None for random ones.
        tokenizer_dir: where the tokenizer is.
        kv_cache: kind of the KV cache, see `load`.
        prefix_cache_bytes: memory for the caches of past requests, see `load`.
        adapter: what finetuning learnt, to put on top of the checkpoint.
    """

    def __init__(
        self,
        model: GPT | None,
        preprocessor: Preprocessor,
        prompt_style: PromptStyle,
        config: Config,
        checkpoint_dir: Path | None = None,
        tokenizer_dir: Path | None = None,
        kv_cache: str = "dense",
        prefix_cache_bytes: int = 0,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.preprocessor = preprocessor
        self.prompt_style = prompt_style
        self.config = config
        self.checkpoint_dir = checkpoint_dir
        self.adapter = adapter
        self.tokenizer_dir = tokenizer_dir
        self.kv_cache = kv_cache
        self.prefix_store = PrefixStore(prefix_cache_bytes) if prefix_cache_bytes else None
        self.precision: str | None = None  # as asked for; None: the best for the device
        self._autocast: torch.dtype | None = None
        self.fixed_kv_cache_size: int | Literal["max_model_supported"] | None = None

    # Making one

    @classmethod
    def load(
        cls,
        model: str | Path,
        init: Literal["pretrained", "random"] | None = "pretrained",
        tokenizer_dir: Path | str | None = None,
        access_token: str | None = None,
        distribute: Literal["auto"] | None = "auto",
        *,
        precision: str | None = None,
        device: str | None = None,
        kv_cache: str = "dense",
        prefix_cache_bytes: int = 0,
        prompt_style: str | PromptStyle | None = None,
        adapter: Path | str | None = None,
    ) -> LLM:
        """Load a model.

        Args:
            model: a checkpoint folder (Hugging Face or LitGPT), a `.gguf` file or the id of a repository, which is
                downloaded. With `init="random"` the name of a config, such as "pythia-14m". A folder that finetuning
                wrote with nothing but what was learnt stands for its base with that.
            init: "pretrained" reads the weights, "random" draws them.
            tokenizer_dir: folder of the tokenizer, if it is not the model's.
            access_token: for a repository that is not public.
            distribute: "auto" puts the model on one device, ready to use; None leaves that to `distribute()` or
                `trainer_setup()`.
            precision: "bf16-true", "32-true", ...; None for the best that the hardware computes in.
            device: "cpu", "cuda", "cuda:1", "mps"; None for the fastest there is.
            kv_cache: kind of the KV cache: "dense" is exact; "window:1024", "sinks:4+1020", "h2o:1024", "snap:1024" and
                "tova:1024" keep so many tokens, "int8" and "int4" so many bits, "offload" stores on the CPU; with a
                comma both, "h2o:1024,int8".
            prefix_cache_bytes: memory for the caches of past requests, so that a prompt that begins like one of them is
                computed from where they part. 0: none.
            prompt_style: how requests are formatted, by name or as an object; "raw" leaves them as they are and None
                does what the checkpoint, or the finetuning of the adapter, says.
            adapter: what finetuning learnt, to put on top of the model: a folder that finetuning wrote, the `.lora`,
                `.adapter` or `.adapter_v2` file in it, or a folder of Hugging Face PEFT.

        Raises:
            UserError: the model does not exist or cannot be read, or a setting is unknown.
        """
        CacheKind.parse(kv_cache)
        path: Path | None = None
        learnt = None if adapter is None else open_adapter(adapter)
        if init == "pretrained":
            path, own = base_and_adapter(resolve(model, access_token=access_token))
            learnt = own if adapter is None else learnt
            with open_source(path) as source:
                config = source.config()
        elif init == "random":
            if learnt is not None:
                raise UserError("an adapter belongs to the weights it was trained on", "use init='pretrained'")
            config = Config.from_name(str(model))
        else:
            raise UserError(f"init must be 'pretrained' or 'random', got {init!r}")
        if tokenizer_dir is not None:
            text_dir = resolve(tokenizer_dir, access_token=access_token)
        elif path is not None:
            text_dir = path
        else:
            raise UserError("a model with random weights brings no tokenizer", "give tokenizer_dir")
        tokenizer = Tokenizer(text_dir)
        noted = learnt is not None and has_prompt_style(learnt.folder)
        style_dir = learnt.folder if learnt is not None and noted else path or text_dir
        style = choose_prompt_style(style_dir, tokenizer, config, prompt_style)
        place = pick_device(device)
        llm = cls(
            None, Preprocessor(tokenizer, place), style, config, path, text_dir, kv_cache, prefix_cache_bytes, learnt
        )
        llm.precision = precision
        if distribute is not None:
            llm._place(place, precision)
        return llm

    def distribute(
        self,
        accelerator: str = "auto",
        devices: int | Literal["auto"] | list[int] = "auto",
        precision: str | None = None,
        quantize: Quantization | None = None,
        generate_strategy: Literal["sequential", "tensor_parallel"] | None = None,
        fixed_kv_cache_size: int | Literal["max_model_supported"] | None = None,
    ) -> None:
        """Put the model on a device, loading it if that has not happened. One device for now.

        Args:
            accelerator: "cpu", "cuda" (or "gpu"), "mps" or "auto".
            devices: 1 or "auto".
            precision: see `load`; None keeps what `load` was given.
            quantize: how the weights are stored: "bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq" or "bnb.int8", which
                the package bitsandbytes brings, or "torchao.int8". None: as they are computed with. A model that is
                quantized stays so, and cannot be saved or have its precision changed.
            generate_strategy: how to use several devices; not available yet.
            fixed_kv_cache_size: tokens that every KV cache holds, and so the longest sequence; "max_model_supported"
                for the model's context. None: what each request needs.

        Raises:
            UserError: a setting is unknown or not available.
        """
        if accelerator not in ("cpu", "gpu", "cuda", "mps", "auto"):
            raise UserError(f"unknown accelerator {accelerator!r}", "use cpu, gpu, cuda, mps or auto")
        if generate_strategy is not None:
            raise UserError(f"generate_strategy={generate_strategy!r} is not available yet", "use one device")
        n_devices = len(devices) if isinstance(devices, list) else devices
        if n_devices not in (1, "auto"):
            raise UserError(f"devices={devices!r}: only one device is supported for now", "use devices=1")
        place = pick_device(accelerator)
        if isinstance(devices, list) and place.type == "cuda":
            place = pick_device(f"cuda:{devices[0]}")
        self._place(place, precision or self.precision, quantize)
        before, self.fixed_kv_cache_size = self.fixed_kv_cache_size, fixed_kv_cache_size
        try:
            self._engine()  # says now if the size does not fit
        except UserError:
            self.fixed_kv_cache_size = before
            raise

    def _place(self, device: torch.device, wanted: str | None, quantize: str | None = None) -> None:
        if self.prefix_store is not None:
            self.prefix_store.clear()
        precision = pick_precision(wanted, device)
        dtype = weight_dtype(precision)
        if quantize is not None:
            check_quantization(quantize, precision)
        if self.model is None and self.checkpoint_dir is not None:
            self.model = load_weights(self.checkpoint_dir, precision, device, self.config, self.adapter, quantize)
            self.config = self.model.config  # the weights may have corrected it
        else:
            if self.model is None:
                self.model = self._random_model().eval()
            if is_quantized(self.model) and (quantize is not None or wanted != self.precision):
                raise UserError(
                    "the model is quantized: neither that nor its precision can change",
                    "load it again, then distribute it",
                )
            self.model.to(dtype=dtype)
            if quantize is not None:
                quantize_model(self.model, quantize, device=device)
            self.model.to(device=device)
        self.precision = wanted
        self._autocast = autocast_dtype(precision)
        self.preprocessor.device = device

    def _random_model(self) -> GPT:
        model = GPT(self.config)
        return model.apply(model._init_weights)

    def trainer_setup(self, trainer_ckpt: Path | str | None = None) -> None:
        """Make the model that a Lightning `Trainer` trains: in float32, on the CPU, in training mode.

        Args:
            trainer_ckpt: a checkpoint of such a `Trainer` to take the weights from; None for the checkpoint that was
                loaded, or random weights if there was none.

        Raises:
            UserError: the checkpoint does not exist or does not fit.
        """
        if self.prefix_store is not None:
            self.prefix_store.clear()
        if trainer_ckpt is None and self.checkpoint_dir is not None:
            place = torch.device("cpu")
            self.model = load_weights(self.checkpoint_dir, "32-true", place, self.config, self.adapter).train()
            self.config = self.model.config
            return
        self.model = self._random_model()
        if trainer_ckpt is not None:
            self.load_state_dict(_trainer_state(Path(trainer_ckpt)))

    # Using it

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.preprocessor.tokenizer

    def generate(
        self,
        prompt: str | Sequence[str] | Sequence[Message],
        sys_prompt: str | None = None,
        max_new_tokens: int | None = 50,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        return_as_token_ids: bool = False,
        stream: bool = False,
        *,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
        return_details: bool = False,
        speculate: str | None = None,
    ) -> Any:
        """Answer a request.

        Args:
            prompt: a request; or several, answered together; or one conversation as messages, which are dicts with
                `role` and `content`.
            sys_prompt: a system prompt, for models that take one.
            max_new_tokens: the longest answer; None: up to the model's context.
            temperature: divides the logits; 0 always takes the likeliest token.
            top_k: choose among this many of the likeliest tokens; None or 0: all.
            top_p: choose among the smallest set of likeliest tokens with at least this probability.
            return_as_token_ids: give token ids, int64 `(T,)`, instead of text.
            stream: give an iterator of pieces of the answer; a piece is `(1,)` for token ids.
            min_p: choose among tokens with at least this fraction of the likeliest one's probability.
            repetition_penalty: above 1 makes tokens that have appeared less likely.
            seed: seed of the choices, the same for each request; None: torch's global generator decides.
            stop: a text or texts that end the answer and are not part of it.
            logprobs: with `return_details`, log-probabilities of the tokens and of this many likeliest ones.
            return_details: give `Result` records; with `stream`, the engine's `Stream` of events.
            speculate: "lookup" or "lookup:N": draft up to N tokens by looking for the last ones earlier in the text and
                check them in one step. Faster where the answer repeats the prompt; chosen as without.

        Returns:
            A str, tensor or `Result`; a list of them for a list of requests; or an iterator.

        Raises:
            UserError: the model is not loaded, the prompt does not fit its context, or a setting is out of its range.
        """
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=as_stop_strings(stop),
            logprobs=logprobs,
        )
        params = with_stops_of(self.prompt_style, self.tokenizer, params)
        requests, several = _requests(prompt)
        prompts = [encode_prompt(self.tokenizer, self.prompt_style, item, sys_prompt=sys_prompt) for item in requests]
        engine = self._engine(None if speculate is None else Speculation.parse(speculate))
        if stream:
            events = engine.stream(prompts, params)
            if return_details:
                return events
            if several:
                raise UserError("stream=True takes one request", "use return_details=True to tell the rows apart")
            return self._tokens(events) if return_as_token_ids else self._texts(events)
        answers = [self._shape(r, return_as_token_ids, return_details) for r in engine.generate(prompts, params)]
        return answers if several else answers[0]

    def _engine(self, speculation: Speculation | None = None) -> Engine:
        if self.model is None:
            raise UserError("the model is not loaded yet", "call distribute() or trainer_setup() first")
        fixed = self.fixed_kv_cache_size
        return Engine(
            self.model,
            self.tokenizer,
            kv_cache=self.kv_cache,
            max_length=self.model.max_seq_length if fixed == "max_model_supported" else fixed,
            autocast=self._autocast,
            prefix_store=self.prefix_store,
            speculation=speculation,
        )

    def _shape(self, result: Result, as_token_ids: bool, details: bool) -> Result | torch.Tensor | str:
        if details:
            return result
        if as_token_ids:
            return torch.tensor(result.token_ids, dtype=torch.int64, device=self.preprocessor.device)
        return result.text

    def _tokens(self, events: Stream) -> Iterator[torch.Tensor]:
        with events:
            for event in events:
                if event.token_id is not None:
                    yield torch.tensor([event.token_id], device=self.preprocessor.device)

    def _texts(self, events: Stream) -> Iterator[str]:
        with events:
            for event in events:
                if event.text:
                    yield event.text

    def benchmark(self, num_iterations: int = 1, **kwargs: Any) -> tuple[Any, dict[str, list[float]]]:
        """Measure `generate`.

        Args:
            num_iterations: how many times to generate.
            kwargs: arguments of `generate`.

        Returns:
            The last answer, and a list of numbers for each measure.

        Raises:
            UserError: fewer than one iteration, or what `generate` raises.
        """
        if num_iterations < 1:
            raise UserError(f"num_iterations must be at least 1, got {num_iterations}")
        as_token_ids = kwargs.get("return_as_token_ids", False)
        measures: dict[str, list[float]] = {}
        results: list[Result] = []
        for _ in range(num_iterations):
            start = perf_counter()
            first: float | None = None
            with self.generate(**{**kwargs, "stream": True, "return_details": True}) as events:
                for _event in events:
                    first = perf_counter() - start if first is None else first
            total = perf_counter() - start
            results = events.results
            n_tokens = sum(len(result.token_ids) for result in results)
            row = {
                "Seconds total": total,
                "Seconds to first token": total if first is None else first,
                "Tokens generated": n_tokens,
                "Inference speed in tokens/sec": n_tokens / total,
            }
            if self.preprocessor.device.type == "cuda":
                row["Total GPU memory allocated in GB"] = torch.cuda.max_memory_allocated() / 1e9
            for name, value in row.items():
                measures.setdefault(name, []).append(value)
        answers = [self._shape(result, as_token_ids, kwargs.get("return_details", False)) for result in results]
        return answers[0] if len(answers) == 1 else answers, measures

    def forward(
        self, input_ids: torch.Tensor, target_ids: torch.Tensor | None = None, loss_fn: LossFn | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Logits, and with targets the loss too.

        Args:
            input_ids: `(B, T)`.
            target_ids: `(B, T)`, the same tokens as `input_ids`, -100 where none is to be learned: the logits at a
                position are compared with the next target.
            loss_fn: takes logits `(B, T - 1, V)` and targets `(B, T - 1)`; default the mean cross-entropy.

        Returns:
            Logits `(B, T, V)`, in float32 (float64 for such a model), or the logits and the loss.
        """
        if self.model is None:
            raise UserError("the model is not loaded yet", "call distribute() or trainer_setup() first")
        with torch.autocast(input_ids.device.type, self._autocast, enabled=self._autocast is not None):
            logits = self.model(input_ids)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # a loss in half precision is a rough one
        if target_ids is None:
            return logits
        return logits, (loss_fn or chunked_cross_entropy)(logits[..., :-1, :], target_ids[..., 1:])

    # Keeping it

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:  # type: ignore[override]
        """The model's tensors, under the names of `GPT`."""
        if self.model is None:
            raise UserError("the model is not loaded yet", "call distribute() or trainer_setup() first")
        return self.model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Overwrite the model's tensors."""
        if self.model is None:
            raise UserError("the model is not loaded yet", "call distribute() or trainer_setup() first")
        return self.model.load_state_dict(state_dict, strict=strict, assign=assign)

    def save(self, out_dir: Path | str, prompt_style: PromptStyle | None = None) -> None:
        """Write a LitGPT checkpoint folder: weights, config, tokenizer and prompt style.

        A LoRA is merged into the weights that are written. Other adapters are written to a file beside their base;
        `load` of the folder puts both together.

        Args:
            out_dir: the folder; files in it are replaced.
            prompt_style: the prompt style to note; default: the one in use.
        """
        if self.model is None:
            raise UserError("the model is not loaded yet", "call distribute() or trainer_setup() first")
        if is_quantized(self.model):
            raise UserError("a quantized model cannot be saved", "load it without quantize; its checkpoint is the same")
        out_dir = Path(out_dir)
        with FolderWriter(out_dir) as folder, plain_weights(self.model) as (state, own):
            for name, tensors in {LITGPT_FILE: state, **own}.items():
                with folder.file(name) as path:
                    torch.save(tensors, path)
            folder.forget(variant.file_name for variant in VARIANTS.values() if variant.file_name not in own)
            for name, content in self._companions().items():
                folder.write_bytes(name, content)
            self.model.config.save(out_dir)  # inside, so that the folder is not whole before it has these too
            save_prompt_style(prompt_style or self.prompt_style, out_dir)

    def _companions(self) -> dict[str, bytes]:
        """The files of the tokenizer and what else lay beside the weights."""
        files: dict[str, bytes] = {}
        for path in (self.checkpoint_dir, self.tokenizer_dir):
            if path is not None and path.suffix == ".gguf":
                with open_source(path) as source:
                    files |= source.companion_files()
            elif path is not None:
                names = [*companions(path), "config.json"]
                files |= {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
        return files


def _requests(prompt: Any) -> tuple[Sequence[Any], bool]:
    """The requests that a person gave as `prompt`, and whether they gave a list of them."""
    if isinstance(prompt, str):
        return [prompt], False
    if isinstance(prompt, Sequence):
        if all(isinstance(item, str) for item in prompt):
            return prompt, True
        if all(isinstance(item, Mapping) for item in prompt):
            return [prompt], False
    raise UserError("prompt must be a text, a list of texts, or a list of messages (one conversation)")


def _trainer_state(path: Path) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint of Lightning's `Trainer`, without the prefix of the module around it."""
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    except Exception as error:  # torch raises many kinds
        raise UserError(f"cannot read {path}: {error}", "it must be a checkpoint of a Lightning Trainer") from error
    ours = re.compile(r"^(?:.*?\.)?((?:transformer|lm_head)\..*)$")
    return {match[1]: tensor for name, tensor in state.items() if (match := ours.match(name))}
