"""What a worker knows of links: only news is taken over and sent on."""

from __future__ import annotations

from matcha import Topology
from matcha.distributed.links.link_state import LinkVersions


def test_what_is_known_is_not_news() -> None:
    """Sent on again it would go round for ever."""
    versions = LinkVersions(0, Topology.from_links([(0, 1), (1, 2)]))
    versions.raise_link(1, 1)
    assert versions.merge({(1, 2): 4}) == {(1, 2): 4}
    assert versions.merge({(1, 2): 4}) == {}
    assert versions.merge({(1, 2): 3}) == {}
    assert versions.members == (0, 1, 2)
