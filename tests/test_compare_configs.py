# Licensed under the Apache License 2.0, see the LICENSE file.

"""The comparison of our models with LitGPT's: nothing that differs goes unsaid, or is excused by the wrong reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from extensions.compat.compare_configs import differences

MODELS: dict[str, Any] = {
    "a": {
        "fields": {"n_layer": 2, "intermediate_size": 7, "moe_intermediate_size": 7},
        "tensors": {"wte": [3, 4]},
    }
}


def test_equal_models_and_fields_of_our_own() -> None:
    ours = copy.deepcopy(MODELS)
    ours["a"]["fields"]["tie_embeddings"] = True
    assert not list(differences(ours, MODELS))


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("fields", "n_layer", 3),
        ("fields", "new_field", 1),
        ("fields", "moe_intermediate_size", 8),
        ("tensors", "wte", [3, 5]),
        ("tensors", "more", [1]),
    ],
)
def test_what_differs_is_found(place: str, key: str, value: Any) -> None:
    theirs = copy.deepcopy(MODELS)
    theirs["a"][place][key] = value
    (found,) = differences(MODELS, theirs)
    assert (found.model, found.place, found.theirs, found.reason) == ("a", key, value, "")


def test_reasons_hold_only_where_they_are_true() -> None:
    theirs = copy.deepcopy(MODELS)
    theirs["a"]["fields"]["moe_intermediate_size"] = None
    (found,) = differences(MODELS, theirs)
    assert "is filled in" in found.reason
    theirs["a"]["fields"]["intermediate_size"] = 9
    assert [found.reason for found in differences(MODELS, theirs)] == ["", ""]


def test_models_that_are_in_one_only() -> None:
    both = differences({**MODELS, "Gemma-3-270m": {}}, {**MODELS, "b": {}})
    assert [(found.model, bool(found.reason)) for found in both] == [("Gemma-3-270m", True), ("b", False)]
