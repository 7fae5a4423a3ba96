"""The muster: at the start, whether every link has been up once.

Telling everybody of each link would take messages in proportion to links times links. They are
counted instead, along the tree in which a breadth-first search from worker 0 finds the workers:
whoever has seen all its links up, and heard the same from all below it, says so to the one above.
"""

from __future__ import annotations

from matcha.distributed.links.table import LinkTable, breadth_first

__all__ = ["Muster"]


class Muster:
    """One worker's part in the count.

    >>> from matcha import Topology
    >>> table = LinkTable(1, Topology.from_links([(0, 1), (1, 2)]))
    >>> muster = Muster(table)
    >>> muster.parent, muster.is_ready
    (0, False)
    >>> muster.hear(2)
    >>> table.raise_link(0, 1), muster.advance(), table.raise_link(2, 1), muster.advance()
    (2, False, 2, True)
    """

    def __init__(self, table: LinkTable) -> None:
        topology, rank = table.topology, table.rank
        around = {worker: topology.neighbors(worker) for worker in range(topology.num_workers)}
        parents = breadth_first(0, around)
        self.parent = parents[rank]
        """Whom this worker reports to; None for worker 0, which tells everybody."""
        self.is_ready = False
        """Whether all links of this worker and of those below it have been up."""
        self.is_over = False
        """Whether this worker knows that all links there are have been up."""
        self._awaited = {child for child, parent in parents.items() if parent == rank}
        self._own = [table.link(peer) for peer in topology.neighbors(rank)]
        self._table = table

    def hear(self, child: int) -> None:
        """A worker below this one is ready."""
        self._awaited.discard(child)

    def advance(self) -> bool:
        """Whether this worker has become ready just now."""
        if self.is_ready or self._awaited or not all(map(self._table.has_been_up, self._own)):
            return False
        self.is_ready = True
        return True

    def ends(self) -> bool:
        """Whether this worker has learnt just now that all links have been up: it tells everybody.

        Also when it learnt so another way: those beyond it may not have.
        """
        if self.is_over or self._table.unseen():
            return False
        self.is_over = True
        return True
