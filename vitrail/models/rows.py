"""Rows of a weight map that vision towers and projectors share: a linear layer's and a norm's, both
with a bias."""

from vitrail.weights.mapping import Copy, Row
from vitrail.weights.sharding import Replicate, Rule


def linear_rows(there: str, here: str, rule: Rule) -> tuple[Row, ...]:
    """A bias is cut with the rows of its weight; where columns are cut, every rank holds it."""
    bias: Rule = rule if rule.dim == 0 else Replicate()
    return (
        Copy(f"{there}.weight", f"{here}.weight", rule),
        Copy(f"{there}.bias", f"{here}.bias", bias, init="zeros"),
    )


def norm_rows(there: str, here: str) -> tuple[Row, ...]:
    return (
        Copy(f"{there}.weight", f"{here}.weight", init="ones"),
        Copy(f"{there}.bias", f"{here}.bias", init="zeros"),
    )
