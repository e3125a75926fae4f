"""Proves that ranks of the job have made gloo's connections between hosts.

Another user of a job's host can call gloo on another host, from an address of the job. So each rank
publishes the connections that it has made in the group's store, which only the job can write, and
looks there for those that it has accepted. Behind NAT both ends differ, so connections from
addresses that no rank's host has are left to the list of admitted addresses.
"""

from __future__ import annotations

from typing import Any, Collection, NamedTuple, Set

_RANKS = "paceline/proofs/ranks"  # that publish their connections
_PUBLISHED = "paceline/proofs/published"  # ranks that have done so
_COMPLETE = "paceline/proofs/complete/%d"  # set once all of so many have
_ADDRESS = "paceline/proofs/%s"  # set by ranks whose host has the address
_UNKNOWN = "paceline/proofs/unknown"  # set by a rank that does not see its connections


class Connection(NamedTuple):
    """The four numbers that no two connections of a network share."""

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
    all have begun, so it is known how many publish theirs. Processes that a script has started
    itself do not; they connect within their host only. A script may make groups one after the other
    with the same keys: the numbers then go on.

    Args:
        store: The group's, as of torch.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        try:
            store.add(_RANKS, 1)
        except RuntimeError as error:
            if "pure virtual" not in str(error):  # a store of the script that has no more than get
                raise
            self._store = None

    def publish(
        self, made: Collection[Connection], addresses: Collection[str], are_visible: bool = True
    ) -> None:
        """Publishes the connections that this rank has made to other hosts.

        Args:
            made: The connections.
            addresses: Of this host.
            are_visible: The kernel shows them. Else no rank can find those that it has accepted.
        """
        if self._store is None:
            return
        if not are_visible:
            self._store.set(_UNKNOWN, "-")
        keys = [_ADDRESS % address for address in addresses] + [each.key for each in made]
        if keys:
            self._store.multi_set(keys, ["-"] * len(keys))
        num_ranks = self._store.add(_RANKS, 0)
        if self._store.add(_PUBLISHED, 1) == num_ranks:
            self._store.set(_COMPLETE % num_ranks, "-")

    def find_unproven(self, accepted: Collection[Connection]) -> Set[Connection]:
        """Returns the accepted connections that no rank has made; waits until all have published.

        Raises RuntimeError if they do not within the store's timeout.
        """
        keys = [connection.key for connection in accepted]
        if self._store is None or not keys:
            return set()
        self._store.get(_COMPLETE % self._store.add(_RANKS, 0))
        if self._store.check(keys) or self._store.check([_UNKNOWN]):
            return set()
        return {each for each in accepted if not self._store.check([each.key])
                and self._store.check([_ADDRESS % each.caller])}  # fmt: skip
