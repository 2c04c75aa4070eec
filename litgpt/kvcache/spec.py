# Licensed under the Apache License 2.0, see the LICENSE file.

"""Reading the one string that chooses a kind of cache, such as `h2o:1024,int8`, and checking that it makes sense."""

from __future__ import annotations

from dataclasses import dataclass

from litgpt.errors import UserError
from litgpt.kvcache.registry import POLICIES, STORES, usage


@dataclass(frozen=True)
class CacheKind:
    """What is kept (the policy) and how it is stored.

    Attributes:
        policy: one of `registry.POLICIES`.
        budget: tokens kept in a global layer, None for all.
        n_sink: first tokens kept beside the budget.
        store: one of `registry.STORES`.
    """

    policy: str = "dense"
    budget: int | None = None
    n_sink: int = 0
    store: str = "plain"

    @classmethod
    def parse(cls, text: str) -> CacheKind:
        """Read a kind.

        Raises:
            UserError: unknown or contradictory; the message names the part and the hint the choices.
        """
        policy: tuple[str, int | None, int] | None = None
        store: str | None = None
        for part in (p.strip() for p in text.split(",")):
            name, _, argument = part.partition(":")
            if name in STORES[1:]:
                if argument:
                    raise UserError(f"KV cache {text!r}: {name} takes no number", usage())
                if store is not None:
                    raise UserError(f"KV cache {text!r} names two ways to store: {store} and {name}", usage())
                store = name
            elif name in POLICIES:
                if policy is not None:
                    raise UserError(f"KV cache {text!r} names two policies: {policy[0]} and {name}", usage())
                policy = (name, *_numbers(text, name, argument))
            else:
                raise UserError(f"unknown kind of KV cache {part!r}", usage())
        chosen, budget, n_sink = policy or ("dense", None, 0)
        return cls(chosen, budget, n_sink, store or "plain")

    def __str__(self) -> str:
        number = f":{self.n_sink}+{self.budget}" if self.policy == "sinks" else f":{self.budget}"
        policy = self.policy + (number if self.budget is not None else "")
        if self.store == "plain":
            return policy
        return self.store if self.policy == "dense" else f"{policy},{self.store}"


def _numbers(text: str, name: str, argument: str) -> tuple[int | None, int]:
    """Budget and number of sinks."""
    if name == "dense":
        if argument:
            raise UserError(f"KV cache {text!r}: dense takes no number, it keeps everything", usage())
        return None, 0
    sinks, plus, budget = argument.partition("+") if name == "sinks" else ("0", "+", argument)
    if not plus or not sinks.isascii() or not sinks.isdigit() or not budget.isascii() or not budget.isdigit():
        wanted = "sinks:4+1020" if name == "sinks" else f"{name}:1024"
        raise UserError(f"KV cache {text!r}: {name} needs how many tokens to keep", f"for example {wanted}")
    if int(budget) < 1 or (name == "sinks" and int(sinks) < 1):
        raise UserError(f"KV cache {text!r}: {name} must keep at least 1 token", usage())
    return int(budget), int(sinks)
