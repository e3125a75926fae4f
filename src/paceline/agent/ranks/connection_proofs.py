"""Proves that ranks of the job have made gloo's connections between hosts.

Another user of a job's host can call gloo on another host, from an address of the job. So each rank
publishes the connections that it has made in the group's store, and looks there for those that it
has accepted. Only ranks of the job can write to a closed store.
"""

from __future__ import annotations

from typing import Any, Collection, NamedTuple, Set

_BEGUN = "paceline/proofs/ranks"  # ranks that will publish their connections
_PUBLISHED = "paceline/proofs/published"  # ranks that have done so
_COMPLETE = "paceline/proofs/complete/%d"  # set once all of so many have
_UNKNOWN = "paceline/proofs/unknown"  # set by a rank that does not see its connections


class Connection(NamedTuple):
    """Both ends of a TCP connection: no two connections of a network share all four values."""

    caller: str
    caller_port: int
    address: str
    port: int

    @property
    def key(self) -> str:
        return "paceline/proofs/%s %d %s %d" % self


class ConnectionProofs:
    """Compares the two ends of a group's connections by the group's store.

    Make it before gloo publishes this rank's address: when a rank has connections with all others,
    all that compare have begun. Processes that a script has started itself do not compare, so
    neither does a group with one. A script may make groups one after the other with the same keys:
    the numbers then go on.

    Args:
        store: The group's, as of torch.
        size: Number of the group's ranks.
    """

    def __init__(self, store: Any, size: int) -> None:
        self._store = store
        try:
            store.check([_BEGUN])  # fails before anything is counted
            num_begun = store.add(_BEGUN, 1)
        except RuntimeError as error:
            if "pure virtual" not in str(error):  # a store of the script that has no more than get
                raise
            self._store, num_begun = None, size
        self._num_ranks = -(-num_begun // size) * size  # once all ranks of this group have begun

    def withdraw(self) -> None:
        """Takes back that this rank has begun: its group cannot be made."""
        if self._store is not None:
            self._store.add(_BEGUN, -1)

    def publish(self, made: Collection[Connection], are_visible: bool = True) -> None:
        """Publishes the connections that this rank has made to other hosts.

        ``are_visible``: the kernel shows them. Else no rank can find those that it has accepted.
        """
        if self._store is None:
            return
        if not are_visible:
            self._store.set(_UNKNOWN, "-")
        if made:
            self._store.multi_set([connection.key for connection in made], ["-"] * len(made))
        if self._store.add(_PUBLISHED, 1) == self._num_ranks:
            self._store.set(_COMPLETE % self._num_ranks, "-")

    def find_unproven(self, accepted: Collection[Connection]) -> Set[Connection]:
        """Returns the accepted connections that no rank has made; waits until all have published.

        Raises RuntimeError if they do not within the store's timeout.
        """
        keys = [connection.key for connection in accepted]
        if self._store is None or not keys or self._store.add(_BEGUN, 0) < self._num_ranks:
            return set()
        self._store.get(_COMPLETE % self._num_ranks)
        if self._store.check(keys) or self._store.check([_UNKNOWN]):
            return set()
        return {each for each in accepted if not self._store.check([each.key])}
