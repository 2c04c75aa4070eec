# Licensed under the Apache License 2.0, see the LICENSE file.

"""The loss and its gradients in chunks equal those of plain cross-entropy on whole logits, and take little memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from litgpt import adapter_v2, lora
from litgpt.train.loss import LOGIT_BYTES, chunk_rows, linear_cross_entropy
from tests.live_bytes import LiveBytes

N, C, V = 23, 12, 61


class LowRank(nn.Module):
    """A frozen map with a trainable low-rank term, as LoRA wraps a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(C, V, bias=False).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(3, C)), nn.Parameter(torch.randn(V, 3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + 0.5 * (self.dropout(x) @ self.a.T @ self.b.T)


class Scaled(nn.Module):
    """A frozen map with a trainable scale and bias, as adapter v2 wraps a head; one more parameter is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, V).requires_grad_(False)
        self.scale, self.bias = nn.Parameter(torch.randn(V)), nn.Parameter(torch.randn(V))
        self.idle = nn.Parameter(torch.randn(V))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (self.linear(x) + self.bias)


HEADS = {
    "plain": lambda: nn.Linear(C, V, bias=False),
    "bias": lambda: nn.Linear(C, V),
    "frozen": lambda: nn.Linear(C, V).requires_grad_(False),
    "low_rank": LowRank,
    "scaled": Scaled,
}
SHAPINGS = {
    "as_is": {},
    "softcap": {"softcap": 1.5},
    "multiplier": {"logit_multiplier": 0.3},
    "both": {"softcap": 2.0, "logit_multiplier": 1.7},
}


def plain(hidden, head, labels, softcap=None, logit_multiplier=1.0, ignore_index=-100):
    """The oracle: whole logits, torch's loss."""
    logits = head(hidden) * logit_multiplier
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")


def make(head_name: str = "plain", dtype: torch.dtype = torch.float64, masked: float = 0.4):
    """A head, hidden states and labels, some of them masked."""
    head = HEADS[head_name]().to(dtype)
    hidden = torch.randn(N, C, dtype=dtype, requires_grad=True)
    labels = torch.randint(V, (N,))
    labels[torch.rand(N) < masked] = -100
    return hidden, head, labels


def gradients(loss: torch.Tensor, hidden: torch.Tensor, head: nn.Module) -> list[torch.Tensor | None]:
    wanted = [hidden, *(p for p in head.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(loss, wanted, allow_unused=True))


def assert_same(ours, theirs, atol: float = 1e-10) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("shaping", SHAPINGS)
@pytest.mark.parametrize("head_name", HEADS)
def test_loss_and_gradients_equal_plain_cross_entropy(head_name: str, shaping: str, chunk: int | None) -> None:
    hidden, head, labels = make(head_name)
    ours = linear_cross_entropy(hidden, head, labels, chunk=chunk, **SHAPINGS[shaping])
    theirs = plain(hidden, head, labels, **SHAPINGS[shaping])
    assert_same([ours], [theirs])
    # as in training: a factor after the loss, which the backward pass has to carry
    assert_same(gradients(ours / 7, hidden, head), gradients(theirs / 7, hidden, head))


@pytest.mark.parametrize("variant", ["lora", "dora", "adapter_v2"])
def test_heads_of_the_variants(variant: str) -> None:
    module = adapter_v2 if variant == "adapter_v2" else lora
    options = {} if variant == "adapter_v2" else {"lora_r": 3, "lora_head": True, "use_dora": variant == "dora"}
    config = module.Config(n_layer=1, n_embd=C, n_head=2, block_size=8, vocab_size=V, padded_vocab_size=V, **options)
    gpt = module.GPT(config).double()
    mark = module.mark_only_adapter_v2_as_trainable if variant == "adapter_v2" else module.mark_only_lora_as_trainable
    mark(gpt)
    head = gpt.lm_head
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    hidden, _, labels = make()
    ours, theirs = linear_cross_entropy(hidden, head, labels, chunk=5), plain(hidden, head, labels)
    assert_same([ours], [theirs])
    found = gradients(ours, hidden, head)
    assert len(found) > 2
    assert_same(found, gradients(theirs, hidden, head))


def test_frozen_hidden_states() -> None:
    hidden, head, labels = make("bias")
    hidden.requires_grad_(False)
    linear_cross_entropy(hidden, head, labels, chunk=4).backward()
    weight, bias = head.weight.grad, head.bias.grad
    head.zero_grad()
    plain(hidden, head, labels).backward()
    assert hidden.grad is None
    assert_same([weight, bias], [head.weight.grad, head.bias.grad])


def test_another_label_may_be_the_one_to_ignore() -> None:
    hidden, head, labels = make("plain", masked=0.0)
    ours = linear_cross_entropy(hidden, head, labels, ignore_index=int(labels[0]))
    assert_same([ours], [plain(hidden, head, labels, ignore_index=int(labels[0]))])


def test_rows_without_a_label_never_reach_the_head() -> None:
    hidden, head, labels = make()
    seen = 0

    def count(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        nonlocal seen
        seen += len(inputs[0])

    head.register_forward_pre_hook(count)
    with torch.no_grad():
        hidden[labels == -100] = torch.nan
    loss = linear_cross_entropy(hidden, head, labels, chunk=4)
    loss.backward()
    assert loss.isfinite()
    assert seen == int((labels != -100).sum())
    assert (hidden.grad[labels == -100] == 0).all()


def test_no_label_at_all_gives_zeros() -> None:
    hidden, head, labels = make("bias", masked=1.1)
    loss = linear_cross_entropy(hidden, head, labels)
    assert loss.item() == 0
    assert_same(gradients(loss, hidden, head), [torch.zeros_like(t) for t in (hidden, head.weight, head.bias)])


def test_tied_embedding_gets_the_gradients_of_both_uses() -> None:
    embedding, head = nn.Embedding(V, C).double(), nn.Linear(C, V, bias=False)
    head.weight = embedding.weight
    ids, labels = torch.randint(V, (N,)), torch.randint(V, (N,))
    linear_cross_entropy(embedding(ids).tanh(), head, labels, chunk=6).backward()
    ours = embedding.weight.grad
    embedding.zero_grad()
    plain(embedding(ids).tanh(), head, labels).backward()
    assert_same([ours], [embedding.weight.grad])


def test_two_losses_of_one_head_and_a_graph_walked_twice() -> None:
    hidden, head, labels = make("bias")
    other = labels.roll(3)

    def total(function) -> torch.Tensor:
        return function(hidden, head, labels) + 0.3 * function(hidden.tanh(), head, other)

    ours, theirs = total(linear_cross_entropy), total(plain)
    for loss in (ours, theirs):
        loss.backward(retain_graph=True)
        loss.backward()
    first = [t.grad.clone() for t in (hidden, head.weight, head.bias)]
    expected = [2 * g for g in gradients(total(plain), hidden, head)]
    assert_same([g / 2 for g in first], expected)


def test_no_second_derivative_is_promised() -> None:
    hidden, head, labels = make()
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = factor * linear_cross_entropy(hidden, head, labels)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_computes_no_gradient(context) -> None:
    hidden, head, labels = make("low_rank")
    with context():
        loss = linear_cross_entropy(hidden, head, labels, chunk=5)
    assert not loss.requires_grad
    assert_same([loss], [plain(hidden, head, labels).detach()])


def test_dropout_in_the_head_is_drawn_once() -> None:
    head, hidden = LowRank(dropout=0.5), torch.randn(N, C, requires_grad=True)
    labels = torch.randint(V, (N,))
    torch.manual_seed(3)
    ours = linear_cross_entropy(hidden, head, labels)  # one chunk: the same draw as for the whole
    after = torch.get_rng_state()
    torch.manual_seed(3)
    theirs = plain(hidden, head, labels)
    assert torch.equal(after, torch.get_rng_state())
    assert_same([ours, *gradients(ours, hidden, head)], [theirs, *gradients(theirs, hidden, head)], atol=1e-4)


@pytest.mark.parametrize("head_name", ["bias", "low_rank"])
def test_autocast(head_name: str) -> None:
    hidden, head, labels = make(head_name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, head, labels, chunk=5)
        theirs = plain(hidden, head, labels)
    assert ours.dtype == torch.float32
    assert_same([ours], [theirs], atol=2e-2)
    assert_same(gradients(ours, hidden, head), gradients(theirs, hidden, head), atol=5e-2)


def test_sums_over_chunks_are_not_rounded_to_bf16() -> None:
    hidden, head, labels = make("bias", torch.bfloat16, masked=0.0)
    exact = gradients(plain(hidden.double(), head.double(), labels), hidden, head.double())
    head.bfloat16()
    ours = gradients(linear_cross_entropy(hidden, head, labels, chunk=1), hidden, head)
    assert linear_cross_entropy(hidden, head, labels).dtype == torch.float32
    assert ours[1].dtype == torch.bfloat16
    bound = 2**-7 * exact[1].abs().max().item()  # one rounding of the logits' gradient and one of the sum
    torch.testing.assert_close(ours[1].double(), exact[1].double(), atol=bound, rtol=0)


def test_parameters_of_another_module_are_refused() -> None:
    hidden, head, labels = make()
    outside = nn.Linear(C, V).double()
    head.forward = outside.forward  # as a sharding wrapper does: the parameters it lists are not those it computes with
    with pytest.raises(RuntimeError, match="other parameters"):
        linear_cross_entropy(hidden, head, labels)


def test_bad_arguments() -> None:
    hidden, head, labels = make()
    with pytest.raises(ValueError, match=r"\(23, 12\) and \(5,\)"):
        linear_cross_entropy(hidden, head, labels[:5])
    with pytest.raises(ValueError, match="got 0"):
        linear_cross_entropy(hidden, head, labels, chunk=0)
    with pytest.raises(IndexError):
        linear_cross_entropy(hidden, head, torch.full((N,), V))


def test_chunk_rows() -> None:
    assert chunk_rows(2048, 576, 128_000) * 128_000 * 4 <= LOGIT_BYTES
    assert chunk_rows(2**20, 4096, 128_000) == 2**20 * 4096 // 128_000
    assert chunk_rows(10, 8, 2**40) == 1


BIG_TOKENS, BIG_WIDTH, BIG_VOCAB = 2048, 16, 128_000
LIMIT = 4 * BIG_TOKENS * BIG_VOCAB // 8


@pytest.mark.parametrize("kind", ["frozen", "low_rank", "softcap"])
def test_peak_of_the_head_with_a_large_vocabulary(kind: str) -> None:
    head: nn.Module = nn.Linear(BIG_WIDTH, BIG_VOCAB, bias=False).requires_grad_(False)
    if kind == "low_rank":
        wrapped = LowRank()
        wrapped.linear = head
        wrapped.a = nn.Parameter(torch.randn(2, BIG_WIDTH))
        wrapped.b = nn.Parameter(torch.randn(BIG_VOCAB, 2))
        head = wrapped
    hidden = torch.randn(BIG_TOKENS // 16, BIG_WIDTH, requires_grad=True)  # two chunks: the peak is that of one
    labels = torch.randint(BIG_VOCAB, (len(hidden),))
    with LiveBytes() as live:
        loss = linear_cross_entropy(hidden, head, labels, softcap=2.0 if kind == "softcap" else None)
        kept = live.now
        loss.backward()
    assert live.peak <= LIMIT
    assert kept < LIMIT / 16  # nothing of the logits waits for the backward pass


PEAK = f"""
import sys, torch
from litgpt import adapter_v2, lora
from litgpt.train.loss import linear_cross_entropy
torch.set_num_threads(2)
def status(key):
    lines = open("/proc/self/status", encoding="utf-8").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
head = torch.nn.Linear({BIG_WIDTH}, {BIG_VOCAB}, bias=False).requires_grad_(False)
hidden = torch.randn(int(sys.argv[2]), {BIG_WIDTH}, requires_grad=True)
labels = torch.randint({BIG_VOCAB}, (len(hidden),))
linear_cross_entropy(hidden[:1], torch.nn.Linear({BIG_WIDTH}, 8), labels[:1] % 8).backward()
before = status("VmRSS")
if sys.argv[1] == "plain":
    torch.nn.functional.cross_entropy(head(hidden), labels, reduction="sum").backward()
else:
    linear_cross_entropy(hidden, head, labels).backward()
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_of_the_process_with_a_large_vocabulary() -> None:
    def run(which: str, n_tokens: int) -> int:
        command = [sys.executable, "-c", PEAK, which, str(n_tokens)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    ours, whole = run("ours", BIG_TOKENS), run("plain", BIG_TOKENS // 4)
    print(f"peak: {ours / 2**20:.0f} MiB, a quarter of the tokens with whole logits {whole / 2**20:.0f} MiB")
    assert LOGIT_BYTES < ours <= LIMIT
    assert whole > 2 * LIMIT  # the measurement sees what it is meant to see
