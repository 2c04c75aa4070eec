# Licensed under the Apache License 2.0, see the LICENSE file.

"""The graph pass for a few rows times a weight: which products it takes, and that the results stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from litgpt.generate.matvec import MAX_ROWS, MatVecPass

aten = torch.ops.aten
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def products(graph: Graph) -> int:
    """Products of matrices left in a graph."""
    return sum(node.target in (aten.mm.default, aten.addmm.default) for node in graph.nodes)


def traced(run: Callable[..., torch.Tensor], *args: torch.Tensor) -> GraphModule:
    """The graph of `run` as the compiler sees it, after the pass."""
    graph_module = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="fake")(*args)
    MatVecPass()(graph_module.graph)
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("n_rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_same_results(dtype: torch.dtype, n_rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    args = [torch.randn(n_rows, 48), torch.randn(20, 48) / 7, torch.randn(20)][: 2 + bias]
    args = [t.to(dtype) for t in args]
    graph_module = traced(F.linear, *args)
    assert products(graph_module.graph) == 0
    y = graph_module(*args)
    assert y.dtype == dtype
    torch.testing.assert_close(y, F.linear(*args), atol=TOLERANCE[dtype], rtol=0)


@torch.no_grad()
def test_other_products_stay() -> None:
    rows, weight = torch.randn(MAX_ROWS, 48), torch.randn(20, 48)
    assert products(traced(F.linear, rows, weight).graph) == 0
    # more rows: a product of matrices is the better code
    assert products(traced(F.linear, torch.randn(MAX_ROWS + 1, 48), weight).graph) == 1
    assert products(traced(F.linear, rows.double(), weight.double()).graph) == 1
    assert products(traced(torch.mm, rows, weight.t().contiguous()).graph) == 1


@pytest.mark.slow
@pytest.mark.parametrize("n_rows", [1, 2])
@torch.no_grad()
def test_compiled(n_rows: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(48, 40), nn.SiLU(), nn.Linear(40, 20, bias=False), nn.LayerNorm(20))
    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, options={"post_grad_custom_pre_pass": MatVecPass()})
    x = torch.randn(n_rows, 48)
    torch.testing.assert_close(compiled(x), network(x), atol=1e-5, rtol=1e-5)
