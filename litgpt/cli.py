# Licensed under the Apache License 2.0, see the LICENSE file.

"""From a function's signature to a command line, through jsonargparse."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import json
import platform
import re
import sys
import tempfile
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import yaml

from litgpt.errors import UsageError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from litgpt.__main__ import Command


def run(name: str, command: Command, argv: list[str]) -> None:
    """Parse `argv` by the signature of a command's function and call it.

    Args:
        name: the command's name.
        command: its row of the table.
        argv: the arguments after the command's name.

    Raises:
        UsageError: the arguments do not fit the signature.
    """
    function = load(command.target)
    parser = build_parser(name, function)
    with _local_configs(argv) as argv, _hidden_secrets(argv):
        try:
            argv = join_class_options(parser, argv, "optimizer")
            config = parser.parse_args(argv)
        except ArgumentError as error:
            if command.fallback is None or "arguments are required" not in str(error):
                raise _usage_error(name, function, error) from error
            config = _parse_with_fallback(name, command.fallback, function, parser, argv)
        arguments = parser.instantiate(config).as_dict()
    arguments.pop("config")
    function(**arguments)


def load(target: str) -> Callable[..., Any]:
    """Import the function that `"module:function"` names."""
    module, _, function = target.partition(":")
    return getattr(import_module(module), function)


def build_parser(name: str, function: Callable[..., Any]) -> ArgumentParser:
    """Return the parser of a command: required parameters are positional, the others are options."""
    import jsonargparse

    # Abbreviated options stay allowed: scripts written for LitGPT may use them.
    parser = jsonargparse.ArgumentParser(prog=f"litgpt {name}", exit_on_error=False, allow_abbrev=True)
    parser.add_argument("--config", action="config", help="YAML file or URL with values for these options.")
    # Where annotations are strings, jsonargparse executes the module's TYPE_CHECKING blocks, which would import torch.
    function.__annotations__ = typing.get_type_hints(function)
    parser.add_function_arguments(function, as_positional=True, fail_untyped=False)
    return parser


def join_class_options(parser: ArgumentParser, argv: list[str], name: str) -> list[str]:
    """Replace `--name`, `--name.class_path C` and `--name.KEY VALUE` by one value with all of it.

    The parser takes a name or a whole dictionary for an argument of the type `str | dict`, but not the name and then
    single values of what it is made with, such as `--optimizer SGD --optimizer.lr 0.1`. What the single values are
    added to may also come from a configuration file.

    Args:
        parser: of the command.
        argv: its arguments.
        name: the option.

    Raises:
        ArgumentError: the other arguments do not fit the signature.
    """
    values: dict[str, str] = {}
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument.startswith(f"--{name}."):
            key, joined, value = argument.removeprefix(f"--{name}.").partition("=")
            values[key.removeprefix("init_args.")] = value if joined else next(arguments, "")
        else:
            rest.append(argument)
    if not values:
        return argv
    base = parser.parse_args([argument for argument in rest if not argument.startswith("--print_")])[name]
    spec = dict(base) if isinstance(base, dict) else {"class_path": base}
    if "class_path" in values:
        spec = {"class_path": values.pop("class_path")}
    arguments_of_class = {key: _as_value(value) for key, value in values.items()}
    spec["init_args"] = {**spec.get("init_args", {}), **arguments_of_class}
    # As a configuration: a dictionary for the option itself upsets the parser after one from a file
    return [*rest, "--config", json.dumps({name: spec})]


def _as_value(text: str) -> Any:
    """A value as YAML reads it, and numbers such as 1e-4, which it takes for text."""
    value = yaml.safe_load(text)
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def version() -> None:
    """Print the versions of litgpt, Python and the packages that matter for a report."""
    from litgpt import __version__

    lines = [f"litgpt {__version__}", f"python {platform.python_version()} on {platform.platform()}"]
    for package in ("torch", "lightning", "safetensors", "tokenizers", "huggingface_hub", "gguf"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            lines.append(f"{package} {metadata.version(package)}")
    sys.stdout.write("\n".join(lines) + "\n")


def _parse_with_fallback(
    name: str, fallback: str, function: Callable[..., Any], parser: ArgumentParser, argv: list[str]
) -> Any:
    """Parse again with the checkpoint that is there without asking for one."""
    path = load(fallback)()
    if path is None:
        raise UsageError(
            "no checkpoint is given, and the demo model is not installed",
            f"name one: `litgpt {name} PATH_OR_REPO`; or get the demo model: `python -m litgpt.scripts.demo`",
        )
    try:
        return parser.parse_args([str(path), *argv])
    except ArgumentError as error:
        raise _usage_error(name, function, error) from error


def _usage_error(name: str, function: Callable[..., Any], error: ArgumentError) -> UsageError:
    """Turn what the parser says, which may be many lines, into one line and a hint."""
    text = error.message if isinstance(getattr(error, "message", None), str) else str(error)
    see = f"see `litgpt {name} --help`"
    hints = typing.get_type_hints(function)
    required = [name for name, p in inspect.signature(function).parameters.items() if p.default is p.empty]
    options = [f"--{option}" for option in hints if option not in ("return", *required)]
    if unknown := re.match(r"unrecognized arguments: (\S+)", text):
        if unknown[1].removeprefix("--").split("=")[0] in required:
            return UsageError(_without_secrets(text, options), f"give only the value, without its name; {see}")
        close = _similar(unknown[1], options)
        return UsageError(_without_secrets(text, options), f"did you mean {close[0]}? {see}" if close else see)
    wrong = re.search(r'Parser key "([\w.]+)":', text)
    value = re.search(r"(?:Given|Got) value: (.*)", text)
    if wrong and value and wrong[1] in hints:
        return UsageError(f"--{wrong[1]} takes {_readable(hints[wrong[1]])}, not {value[1].strip()!r}", see)
    return UsageError(text, see)


def _similar(argument: str, options: list[str]) -> list[str]:
    """The options that an unknown one may have been meant to be, the likeliest first."""
    return difflib.get_close_matches(argument.split("=")[0].replace("-", "_").replace("__", "--", 1), options)


def _without_secrets(text: str, options: list[str]) -> str:
    """A message about unknown options without the values of those that may be a misspelled access token."""
    for option in re.findall(r"--[^\s=]+", text):
        if _similar(option, options)[:1] == ["--access_token"]:
            text = re.sub(rf"{re.escape(option)}[\s=]\S+", option, text)
    return text


def _readable(hint: Any) -> str:
    """A type as a person would write its values: `Literal["a", "b"] | None` is `a, b or null`."""
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join("null" if value is None else str(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_readable(part) for part in typing.get_args(hint))
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", Path: "a path"}
    return names.get(hint, str(hint).replace("<class '", "").replace("'>", ""))


@contextlib.contextmanager
def _local_configs(argv: list[str]) -> Iterator[list[str]]:
    """`argv` with the configuration files that are given as URLs replaced by local copies."""
    with contextlib.ExitStack() as stack:
        local = []
        for index, arg in enumerate(argv):
            option, _, value = arg.rpartition("=") if arg.startswith("--config=") else ("", "", arg)
            is_config = option or (index and argv[index - 1] == "--config")
            if is_config and value.startswith(("http://", "https://")):
                value = stack.enter_context(_fetched(value))
            local.append(f"{option}={value}" if option else value)
        yield local


@contextlib.contextmanager
def _fetched(url: str) -> Iterator[str]:
    """A temporary copy of a small text file from the web."""
    try:
        with urlopen(url, timeout=30) as response:
            content = response.read()
    except OSError as error:
        raise UsageError(f"cannot read the configuration {url}: {error}", "check the address") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_bytes(content)
        yield str(path)


@contextlib.contextmanager
def _hidden_secrets(argv: list[str]) -> Iterator[None]:
    """Keep access tokens out of what `--print_config` prints, even one that is given on the same line."""
    if not any(arg.startswith("--print_") for arg in argv):  # options may be abbreviated
        yield
        return
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            yield
    finally:
        sys.stdout.write(re.sub(r"(access_token:).*", r"\1 null", shown.getvalue()))
