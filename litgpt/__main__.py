# Licensed under the Apache License 2.0, see the LICENSE file.

"""The command `litgpt`: a table of commands, each imported only when it is asked for, and how errors are shown.

This module imports neither torch nor the argument parser, so that `litgpt --help` answers at once.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from litgpt.errors import UsageError, UserError
from litgpt.runtime import debug_enabled, setup_logging

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


@dataclass(frozen=True)
class Command:
    """One row of the table.

    Args:
        target: `"module:function"`; the signature of the function is the command line.
        help: the line shown by `litgpt --help`.
        fallback: `"module:function"` that returns the checkpoint to use when none is given, or None if there is none.
    """

    target: str
    help: str
    fallback: str | None = None


COMMANDS = {
    "download": Command("litgpt.scripts.download:download_from_hub", "Download a checkpoint from a model hub."),
    "finetune": Command("litgpt.finetune.lora:setup", "The same as finetune_lora."),
    "finetune_lora": Command("litgpt.finetune.lora:setup", "Train small updates beside a model's weights."),
    "finetune_full": Command("litgpt.finetune.full:setup", "Train all weights of a model."),
    "finetune_adapter": Command("litgpt.finetune.adapter:setup", "Train prompts inside a model."),
    "finetune_adapter_v2": Command("litgpt.finetune.adapter_v2:setup", "Train prompts, norms, scales and shifts."),
    "generate": Command(
        "litgpt.generate.base:main",
        "Continue a prompt with a model: a folder, a .gguf file or a repository id.",
        fallback="litgpt.scripts.demo:find_demo_model",
    ),
    "generate_full": Command("litgpt.generate.full:main", "Answer a request with a model after full finetuning."),
    "generate_adapter": Command("litgpt.generate.adapter:main", "Answer a request with a model and an adapter."),
    "generate_adapter_v2": Command("litgpt.generate.adapter_v2:main", "The same with an adapter of the second kind."),
    "generate_speculatively": Command(
        "litgpt.generate.speculative_decoding:main",
        "Continue a prompt with a model, faster, with the help of a smaller one.",
    ),
    "convert_to_litgpt": Command(
        "litgpt.scripts.convert_hf_checkpoint:convert_hf_checkpoint", "Write LitGPT's files beside a model's own."
    ),
    "convert_from_litgpt": Command(
        "litgpt.scripts.convert_lit_checkpoint:convert_lit_checkpoint", "Write a model as a Hugging Face folder."
    ),
    "convert_to_gguf": Command("litgpt.scripts.convert_to_gguf:convert_to_gguf", "Write a model as one .gguf file."),
    "convert_pretrained_checkpoint": Command(
        "litgpt.scripts.convert_pretrained_checkpoint:convert_pretrained_checkpoint",
        "Keep only the model of a checkpoint that training can resume from.",
    ),
    "merge_lora": Command("litgpt.scripts.merge_lora:merge_lora", "Put a LoRA into the weights of its base."),
    "show": Command("litgpt.scripts.show:show", "Say what a checkpoint is: architecture, memory, template, stops."),
    "validate": Command("litgpt.scripts.validate:validate_setup", "Check that a checkpoint is complete and usable."),
    "version": Command("litgpt.cli:version", "Show the versions of litgpt and of what it runs on."),
}


def help_text() -> str:
    """Return what `litgpt --help` prints."""
    width = max(map(len, COMMANDS)) + 2
    rows = "\n".join(f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items())
    return f"""\
usage: litgpt [--debug] COMMAND ...

Load, run and finetune open language models.

commands:
{rows}

options:
  -h, --help     Show this help. `litgpt COMMAND --help` shows the options of one command.
  --version      Show the version.
  --debug        Show tracebacks and debugging messages, as LITGPT_DEBUG=1 does.

examples:
  litgpt download HuggingFaceTB/SmolLM2-135M-Instruct
  litgpt generate HuggingFaceTB/SmolLM2-135M-Instruct --prompt "What do llamas eat?"
  litgpt finetune HuggingFaceTB/SmolLM2-135M-Instruct --data JSON --data.json_path my.json
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    Args:
        args: the arguments after the program's name; None takes those of the process.

    Raises:
        SystemExit: with 1 for an error, 2 for a wrong command line, 130 after Ctrl-C. A success returns.
    """
    argv = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in argv or debug_enabled()
    argv = [arg for arg in argv if arg != "--debug"]
    _set_up_streams()
    setup_logging(debug)
    try:
        _dispatch(argv)
        sys.stdout.flush()  # here, so that a closed pipe is noticed while we can still handle it
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        sys.exit(_report(error, argv[0] if argv else ""))


def _dispatch(argv: list[str]) -> None:
    """Find the command and run it."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        sys.stdout.write(help_text())
        return
    name, rest = argv[0], argv[1:]
    if name == "--version":
        from litgpt import __version__

        sys.stdout.write(f"litgpt {__version__}\n")
        return
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}", _suggest(name))
    from litgpt.cli import run

    run(name, COMMANDS[name], rest)


def _suggest(name: str) -> str:
    best = difflib.get_close_matches(name.lower(), COMMANDS, n=1)
    if best:  # and those that are about as likely: names that begin alike are many
        similarity = difflib.SequenceMatcher(None, name.lower(), best[0]).ratio()
        close = difflib.get_close_matches(name.lower(), COMMANDS, n=3, cutoff=similarity - 0.05)
        return f"did you mean {' or '.join(close)}?"
    return f"the commands are {', '.join(COMMANDS)}; see `litgpt --help`"


def _report(error: BaseException, name: str) -> int:
    """Show an error of a command as one line and a hint on standard error; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has left, as `litgpt ... | head` does. Python would complain again while it closes.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    if isinstance(error, KeyboardInterrupt):
        sys.stderr.write("\ninterrupted\n")
        return EXIT_INTERRUPTED
    message, hint = _describe(error)
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    sys.stderr.write(f"hint: {hint or f'see `litgpt {name} --help`'}\n")
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _describe(error: BaseException) -> tuple[str, str]:
    """What to say about an error, and what to advise."""
    if isinstance(error, UserError):
        return error.message, error.hint
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return f"out of memory: {error}", "use a smaller model, a shorter length, or --precision bf16-true"
    # A ValueError is a fault of the input, an OSError one of the system; anything else is likely ours: name its kind.
    plain = isinstance(error, ValueError | OSError) and str(error)
    message = str(error) if plain else f"{type(error).__name__}: {error}"
    return message, "run it again with --debug to see where this happened"


def _set_up_streams() -> None:
    """Write UTF-8 whatever the system's code page is; a character that cannot be written must not end the program."""
    encoding = None if os.environ.get("PYTHONIOENCODING") else "utf-8"
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)  # missing when somebody replaced the stream
        if reconfigure is not None:
            reconfigure(encoding=encoding, errors="replace")


if __name__ == "__main__":
    main()
