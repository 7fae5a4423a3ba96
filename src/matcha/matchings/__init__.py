"""Step 1: the links split into matchings, which can talk at the same time; and verifiers."""

from matcha.matchings.decompositions import (
    Groups,
    check_decomposition,
    cliques,
    decompose,
    is_clique_partition,
    is_decomposition,
    is_matching,
    single_links,
    sort_matchings,
)

__all__ = [
    "Groups",
    "check_decomposition",
    "cliques",
    "decompose",
    "is_clique_partition",
    "is_decomposition",
    "is_matching",
    "single_links",
    "sort_matchings",
]
