# Licensed under the Apache License 2.0, see the LICENSE file.

"""A module imports only from its own layer and the ones below, and imports make no cycle.

Read from the source by AST, so imports inside functions count as well: moving an import into a function is no way
around the rule. The exceptions are named in `MAY_IMPORT_UPWARD`. Imports under `if TYPE_CHECKING:` are free.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "litgpt"

# Layer -> modules and packages of litgpt; the longest name that fits decides. Everything must be listed.
LAYERS: dict[int, list[str]] = {
    0: ["constants", "errors"],
    1: ["families", "config"],
    2: ["rope", "layers", "attention", "flex", "kvcache"],
    3: ["model"],
    4: ["peft", "lora", "lora_layers", "lora_adapters", "adapter", "adapter_v2", "ia3"],
    5: ["tokenizer", "tokenizer_files", "detokenizer", "chat_template", "prompts", "prompt_styles", "checkpoint"],
    6: ["args", "data", "quantize", "quantized_linear", "runtime"],
    7: ["generate", "train"],
    8: ["finetune", "pretrain", "api", "chat", "deploy", "eval", "scripts", "utils"],
    9: ["__main__", "__init__", "cli"],
}

# Functions whose own imports may point upward: conveniences that people look for on the lower class. By module.
MAY_IMPORT_UPWARD: dict[str, set[str]] = {
    "litgpt.config": {
        "Config.norm_class",
        "Config.mlp_class",
        "Config.from_checkpoint",
    },
    "litgpt.model": {"GPT.from_checkpoint"},
}


@dataclass(frozen=True)
class Import:
    """One import of a module of the package: who, whom, and inside which function ("" at the top)."""

    source: str
    target: str
    function: str
    line: int

    @property
    def excepted(self) -> bool:
        return self.function in MAY_IMPORT_UPWARD.get(self.source, set())


def layer(module: str) -> int:
    """The layer of `litgpt.a.b`, given by the longest listed name that it equals or lies in."""
    name = module.removeprefix("litgpt").removeprefix(".") or "__init__"
    while name:
        for number, names in LAYERS.items():
            if name in names:
                return number
        name = name.rpartition(".")[0]
    raise AssertionError(f"{module} is in no layer: add it to LAYERS in {Path(__file__).name}")


def find_modules(package: Path) -> dict[str, Path]:
    """Module name -> file, `__init__.py` under the package's own name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def find_imports(module: str, path: Path, modules: dict[str, Path]) -> Iterator[Import]:
    """All imports of the package's own modules in one file, those for type checkers only left out."""
    here = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, scope: tuple[str, ...], function: str) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            children: list[ast.AST] = [*node.orelse]
        else:
            children = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = (*scope, node.name)
            if not isinstance(node, ast.ClassDef):
                function = ".".join(scope)
        for target in _targets(node, here, modules):
            yield Import(module, target, function, getattr(node, "lineno", 0))
        for child in children:
            yield from visit(child, scope, function)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), (), "")


def _targets(node: ast.AST, here: str, modules: dict[str, Path]) -> list[str]:
    """The modules of the package that an import statement names; `from package import module` names the module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in modules]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:  # relative: one dot is the package that the file is in
        parent = here.rsplit(".", node.level - 1)[0] if node.level > 1 else here
        base = f"{parent}.{base}".rstrip(".")
    names = [f"{base}.{alias.name}" for alias in node.names]
    found = [name for name in names if name in modules]
    # A name that is no module of its own comes out of the base's file.
    return found + ([base] if base in modules and len(found) < len(names) else [])


def all_imports(package: Path) -> list[Import]:
    modules = find_modules(package)
    return [found for module, path in modules.items() for found in find_imports(module, path, modules)]


def upward_imports(package: Path) -> list[str]:
    """A readable line for each import that points to a higher layer."""
    return [
        f"{i.source}:{i.line} (layer {layer(i.source)}) imports {i.target} (layer {layer(i.target)})"
        for i in all_imports(package)
        if layer(i.target) > layer(i.source) and not i.excepted
    ]


def import_cycle(package: Path) -> list[str]:
    """The modules of one cycle of imports, or an empty list."""
    graph: dict[str, set[str]] = {module: set() for module in find_modules(package)}
    for i in all_imports(package):
        if not i.excepted and i.target != i.source:
            graph[i.source].add(i.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def plant(folder: Path, files: dict[str, str]) -> Path:
    """Write a small package called litgpt."""
    package = folder / "litgpt"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


def test_every_module_has_a_layer() -> None:
    assert all(layer(module) in LAYERS for module in find_modules(PACKAGE))


def test_no_import_points_upward() -> None:
    assert upward_imports(PACKAGE) == []


def test_no_import_cycle() -> None:
    assert import_cycle(PACKAGE) == []


def test_extensions_are_not_imported() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "extensions", path
            elif isinstance(node, ast.Import):
                assert all(alias.name.split(".")[0] != "extensions" for alias in node.names), path


@pytest.mark.parametrize(
    "text",
    [
        "from litgpt.model import GPT",
        "import litgpt.model",
        "from litgpt import model",
        "from . import model",
        "from .model import GPT",
        "def f():\n    from litgpt.model import GPT",
        "class A:\n    def f(self):\n        if True:\n            import litgpt.model as m",
    ],
)
def test_planted_upward_import_is_found(tmp_path: Path, text: str) -> None:
    package = plant(tmp_path, {"__init__.py": "", "model.py": "", "rope.py": text})
    assert len(upward_imports(package)) == 1
    assert "litgpt.rope" in upward_imports(package)[0]


def test_planted_relative_import_of_the_parent_package_is_found(tmp_path: Path) -> None:
    files = {"__init__.py": "", "model.py": "", "kvcache/__init__.py": "", "kvcache/base.py": "from ..model import GPT"}
    assert len(upward_imports(plant(tmp_path, files))) == 1


def test_exceptions_hold_in_the_named_function_only(tmp_path: Path) -> None:
    method = "class Config:\n    def {}(self):\n        from litgpt.layers import RMSNorm"
    files = {"__init__.py": "", "layers.py": "", "config.py": method.format("norm_class")}
    assert upward_imports(plant(tmp_path, files)) == []
    files["config.py"] = method.format("other")
    assert len(upward_imports(plant(tmp_path, files))) == 1


def test_imports_for_type_checkers_are_free(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from litgpt.model import GPT"
    assert upward_imports(plant(tmp_path, {"__init__.py": "", "model.py": "", "rope.py": text})) == []


def test_planted_cycle_is_found(tmp_path: Path) -> None:
    files = {"__init__.py": "", "rope.py": "import litgpt.layers", "layers.py": "def f():\n    import litgpt.rope"}
    assert set(import_cycle(plant(tmp_path, files))) == {"litgpt.rope", "litgpt.layers"}


def test_unlisted_module_is_found(tmp_path: Path) -> None:
    modules = find_modules(plant(tmp_path, {"__init__.py": "", "surprise.py": ""}))
    with pytest.raises(AssertionError, match=r"litgpt\.surprise is in no layer"):
        [layer(module) for module in modules]
