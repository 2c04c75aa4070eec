# Licensed under the Apache License 2.0, see the LICENSE file.

"""From what a person names (a path, a name under `checkpoints/`, a repository id) to files on this machine."""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

from litgpt.checkpoint.hub_errors import explained, is_network_down
from litgpt.checkpoint.transfer import INCOMPLETE, RemoteFile, fetch_all
from litgpt.errors import MissingFileError, UserError

logger = logging.getLogger(__name__)

CHECKPOINTS = Path("checkpoints")
# `org/name`, and for repositories of many .gguf files `org/name:Q8_0`
_REPO_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<quant>[\w.-]+))?")
_HUB_URL = re.compile(r"^https?:/+huggingface\.co/")
_FILE_SUFFIXES = {".gguf", ".pth", ".pt", ".bin", ".safetensors", ".json", ".yaml", ".ckpt"}
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pth", ".gguf"}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TEXT_FILES = re.compile(
    r"tokenizer[\w.-]*|vocab\.(json|txt)|merges\.txt|added_tokens\.json|special_tokens_map\.json|chat_template[\w.]*"
    r"|additional_chat_templates/[\w-]+\.jinja"
    r"|generation_config\.json|config\.json|model_config\.yaml|prompt_style\.yaml"
)
# One quantization of many: the usual compromise first, then the next best
_QUANTS = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16", "F32")


def resolve(path_or_repo: str | Path, access_token: str | None = None) -> Path:
    """Return the local folder or file that a person means, and download it if it is a repository id.

    Args:
        path_or_repo: an existing path; or one under `checkpoints/`; or a repository id as `org/name`, which is
            downloaded into `checkpoints/org/name` unless it is there; `org/name:Q8_0` picks one of many .gguf files.
        access_token: for private and gated repositories; None uses `$HF_TOKEN` or the stored login.

    Raises:
        UserError: nothing of that name exists here, and it cannot be downloaded.
    """
    name = _HUB_URL.sub("", Path(path_or_repo).expanduser().as_posix())
    for path in (Path(name), CHECKPOINTS / name):
        if path.exists() and not (path / INCOMPLETE).exists():
            return only_gguf(path) or path
    match = _REPO_ID.fullmatch(_short_name(Path(name)))
    if match is None or PurePosixPath(name).suffix in _FILE_SUFFIXES:
        if Path(name).exists():
            raise UserError(f"the download into {name} was interrupted", "run the same `litgpt download` again")
        hint = _spelling_hint(name, "give an existing path, or a repository id as org/name to download it")
        raise MissingFileError(f"{name!r} does not exist, neither here nor in {CHECKPOINTS.name}/", hint)
    folder, quant = CHECKPOINTS / match["repo"], match["quant"]
    if quant is None or not any(quant.lower() in file.name.lower() for file in folder.glob("*.gguf")):
        folder = download_repo(match["repo"], folder, access_token, quant=quant)
    return only_gguf(folder, quant) or folder


def download_repo(
    repo_id: str,
    out_dir: str | Path | None = None,
    access_token: str | None = None,
    tokenizer_only: bool = False,
    quant: str | None = None,
    check_config: bool = True,
) -> Path:
    """Download what is needed to run a model: one form of its weights, its configuration and its tokenizer.

    Files that are there already are kept, half-fetched ones are continued.

    Args:
        repo_id: `org/name`.
        out_dir: the folder that gets the files; `checkpoints/org/name` when None.
        access_token: for private and gated repositories; None uses `$HF_TOKEN` or the stored login.
        tokenizer_only: leave out the weights.
        quant: which file to take from a repository of .gguf files, as part of its name.
        check_config: refuse an unsupported architecture before its weights are fetched.

    Returns:
        The folder.

    Raises:
        UserError: the repository is missing, private, gated or incomplete; no network; no space; not supported.
    """
    from huggingface_hub.errors import HTTPError

    folder = Path(out_dir) if out_dir is not None else CHECKPOINTS / repo_id
    with explained(repo_id, lambda: _spelling_hint(repo_id, "check the name; `litgpt download list` shows known ones")):
        try:
            files, headers = list_files(repo_id, access_token)
        except (HTTPError, OSError) as error:
            here = folder if _is_whole(folder, tokenizer_only) else _in_hub_cache(repo_id, tokenizer_only)
            if here is None or not is_network_down(error):
                raise
            logger.info("The hub cannot be asked for changes: using what is in %s", here)
            return here
        logger.info("Downloading %s to %s", repo_id, folder)
        texts = [file for name, file in files.items() if _TEXT_FILES.fullmatch(name)]
        fetch_all(texts, folder, headers, "files")
        if not tokenizer_only:
            if check_config:
                _check_config(folder)
            _fetch_weights(repo_id, files, folder, headers, quant)
    shutil.rmtree(folder / INCOMPLETE, ignore_errors=True)
    return folder


def only_gguf(path: Path, quant: str | None = None) -> Path | None:
    """Return the .gguf file of a folder that holds nothing else to load, or the one with `quant` in its name."""
    if not path.is_dir() or (quant is None and any(f.suffix in _WEIGHT_SUFFIXES - {".gguf"} for f in path.iterdir())):
        return None
    names = _choose_gguf(sorted(file.name for file in path.glob("*.gguf")), quant)
    return path / names[0] if names else None


def choose_weights(names: Iterable[str], folder: Path | None = None, quant: str | None = None) -> list[str]:
    """Return the files that make up one copy of a model's weights, in the order in which a folder is opened.

    Args:
        names: all files of the repository.
        folder: where the `*.index.json` files are, which say what the shards are called.
        quant: part of the name of the .gguf file to take; it also prefers .gguf files to other formats.
    """
    top = sorted(name for name in names if "/" not in name)
    gguf = _choose_gguf([name for name in top if name.endswith(".gguf")], quant)
    if quant is not None:
        return gguf
    if "lit_model.pth" in top:
        return ["lit_model.pth"]
    for single, index in zip(("model.safetensors", "pytorch_model.bin"), _INDEXES, strict=True):
        if index in top and folder is not None:
            return _named_by(folder / index)
        if single in top:
            return [single]
    return gguf


def _named_by(index: Path) -> list[str]:
    """The files that an index of shards names."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({str(file) for file in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of weights: {type(error).__name__}: {error}", "tell its owner") from error


def _choose_gguf(names: list[str], quant: str | None) -> list[str]:
    """One .gguf file, or several if it is split; none of those that hold only the encoder of images."""
    names = [name for name in names if not name.startswith("mmproj")]
    for wanted in (quant,) if quant is not None else _QUANTS:
        found = [name for name in names if wanted.lower() in name.lower()]
        if found:
            return found if all("-of-" in name for name in found) else found[:1]
    if quant is not None:
        raise UserError(f"no .gguf file has {quant!r} in its name", f"there are: {', '.join(names) or 'none'}")
    return names[:1]


def list_files(
    repo_id: str, access_token: str | None, repo_type: Literal["model", "dataset"] = "model"
) -> tuple[dict[str, RemoteFile], dict[str, str]]:
    """The files of a repository at its newest revision, and the headers for fetching them."""
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    endpoint = constants.ENDPOINT
    api = HfApi(endpoint=endpoint, token=access_token)
    ask = api.model_info if repo_type == "model" else api.dataset_info
    info = ask(repo_id, files_metadata=True, timeout=30)
    files = {}
    for item in info.siblings or []:
        url = hf_hub_url(repo_id, item.rfilename, repo_type=repo_type, revision=info.sha, endpoint=endpoint)
        digest = item.lfs.sha256 if item.lfs is not None else item.blob_id
        files[item.rfilename] = RemoteFile(item.rfilename, url, item.size, digest)
    return files, build_hf_headers(token=access_token, library_name="litgpt")


def _fetch_weights(
    repo_id: str, files: dict[str, RemoteFile], folder: Path, headers: dict[str, str], quant: str | None
) -> None:
    """Fetch one form of the weights, with the index that names its parts."""
    indexes = [files[name] for name in _INDEXES if name in files]
    fetch_all(indexes, folder, headers, "index")
    weights = [_lookup(files, name, repo_id) for name in choose_weights(files, folder, quant)]
    if not weights:
        raise UserError(
            f"{repo_id} has no weights in a known format (safetensors, .bin, .pth, .gguf)",
            "look for another repository of the same model, or use --tokenizer_only true",
        )
    fetch_all(weights, folder, headers, "weights")


def _lookup(files: dict[str, RemoteFile], name: str, repo_id: str) -> RemoteFile:
    if PureWindowsPath(name).name != name:  # knows the separators of every system
        raise UserError(f"the index of {repo_id} names a file outside of its folder: {name}", "do not use it")
    if name not in files:
        raise UserError(
            f"{repo_id} lacks {name}, which its index lists", "the repository is incomplete; tell its owner"
        )
    return files[name]


def _check_config(folder: Path) -> None:
    from litgpt.checkpoint.dequantize import read_config
    from litgpt.config import Config

    if (folder / "config.json").is_file():
        try:
            read_config(folder, Config)
        except UserError as error:
            hint = "`litgpt download --convert_checkpoint false` fetches it all the same"
            raise UserError(error.message, f"{error.hint}; {hint}" if error.hint else hint) from error


def _is_whole(folder: Path, tokenizer_only: bool) -> bool:
    """Whether an earlier download into a folder finished, as far as can be told without the hub."""
    if not folder.is_dir() or (folder / INCOMPLETE).exists():
        return False
    wanted = {".json"} if tokenizer_only else _WEIGHT_SUFFIXES
    return any(file.suffix in wanted for file in folder.iterdir())


def _in_hub_cache(repo_id: str, tokenizer_only: bool) -> Path | None:
    """The folder where other programs that use the hub keep this repository, if it is there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo_id, "config.json")
    return Path(config).parent if isinstance(config, str) and _is_whole(Path(config).parent, tokenizer_only) else None


def _short_name(path: Path) -> str:
    """`checkpoints/org/name` as `org/name`."""
    with contextlib.suppress(ValueError):
        path = path.relative_to(CHECKPOINTS)
    return path.as_posix()


def _spelling_hint(name: str, otherwise: str) -> str:
    """Names that look like `name`, of checkpoints that are here and of models we know, or else another hint."""
    from litgpt.config import name_to_config

    known = {f"{config['hf_config']['org']}/{config['hf_config']['name']}" for config in name_to_config.values()}
    known |= {_short_name(path) for path in CHECKPOINTS.glob("*/*")}
    close = difflib.get_close_matches(name, sorted(known), n=2, cutoff=0.75)
    return f"did you mean {' or '.join(close)}?" if close else otherwise
