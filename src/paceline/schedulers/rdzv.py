"""The same command typed on each node: nothing starts them but people, or their pods."""

from __future__ import annotations

from paceline.remote.transport import Transport
from paceline.rendezvous.typed import TypedTransport
from paceline.schedulers.scheduler import NOW, Options, Scheduler


class Rendezvous(Scheduler):
    """For nodes of which one cannot log in to another."""

    name, title = "rdzv", "The rendezvous"
    typed = "--rdzv HOST:PORT"
    starting = (NOW - {"hosts", "fastest"}) | {
        "rdzv", "rdzv_id", "rdzv_key_file", "node_rank", "rdzv_timeout",
    }  # fmt: skip
    knows_hosts = False
    fixed = "the first node waits for all the others before it begins"

    def start(self, options: Options) -> Transport:
        """The first node's; the others serve it (:func:`paceline.rendezvous.typed.serve`)."""
        if options.endpoint is None:
            raise self._cannot("needs an address")
        return TypedTransport(options.endpoint)


SCHEDULER = Rendezvous()
