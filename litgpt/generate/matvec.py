# Licensed under the Apache License 2.0, see the LICENSE file.

"""A pass over compiled graphs: on the CPU, a few rows times a weight become one loop that reads the weight once.

Decoding reads every weight for a few rows of activations, so its speed is the rate at which memory delivers weights.
The libraries' kernels for such products reach half of that on many CPUs and read the weight anew for more rows; the
loop that the compiler writes for `(row * weight).sum(-1)` reaches nearly all of it and serves all rows at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten, prims = torch.ops.aten, torch.ops.prims
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_ROWS = 4  # every row more is more code: twice the time to compile at 8


class MatVecPass(CustomGraphPass):
    """Rewrites `mm` and `addmm` of up to `MAX_ROWS` rows and a transposed `(n_out, n_in)` weight."""

    def __call__(self, graph: Graph) -> None:
        """Change `graph` in place."""
        for target in (aten.mm.default, aten.addmm.default):
            for node in graph.find_nodes(op="call_function", target=target):
                *bias, rows, matrix = node.args
                weight = _transposed(matrix)
                if weight is not None and not node.kwargs and _fits(rows, weight):
                    _rewrite(graph, node, rows, weight, bias[0] if bias else None)

    def uuid(self) -> Any:
        """Compiled graphs are kept on disk by what made them."""
        return get_hash_for_files((str(Path(__file__)),))


def _transposed(node: Any) -> Node | None:
    """The matrix of which `node` is the transpose."""
    if not isinstance(node, Node) or node.target is not aten.permute.default or node.args[1] not in ([1, 0], (1, 0)):
        return None
    source = node.args[0]
    return source if isinstance(source, Node) else None


def _fits(rows: Any, weight: Node) -> bool:
    x, w = rows.meta["val"], weight.meta["val"]
    return (
        isinstance(x.shape[0], int)
        and x.shape[0] <= MAX_ROWS
        and x.device.type == "cpu"
        and x.dtype == w.dtype
        and x.dtype in FLOATS
        and w.is_contiguous()
    )


def _rewrite(graph: Graph, node: Node, rows: Node, weight: Node, bias: Node | None) -> None:
    def call(target: Any, *args: Any) -> Node:
        made = graph.call_function(target, args)
        made.meta["val"] = target(*torch.fx.map_arg(args, lambda a: a.meta["val"]))
        return made

    value = rows.meta["val"]
    with graph.inserting_before(node), node.meta["val"].fake_mode:
        # as_strided keeps the rows a buffer: without it, what computes them would be done again for every output
        x = call(aten.as_strided.default, rows, list(value.shape), list(value.stride()))
        x, w = (call(prims.convert_element_type.default, t, torch.float32) for t in (x, weight))
        sums = []  # one for each row, all of one loop over the weight
        for i in range(value.shape[0]):
            y = call(aten.sum.dim_IntList, call(aten.mul.Tensor, call(aten.select.int, x, 0, i), w), [-1])
            sums.append(call(aten.unsqueeze.default, y, 0))
        y = sums[0] if len(sums) == 1 else call(aten.cat.default, sums)
        if bias is not None:
            y = call(aten.add.Tensor, y, bias)
        y = call(prims.convert_element_type.default, y, value.dtype)
    node.replace_all_uses_with(y)
    graph.erase_node(node)
