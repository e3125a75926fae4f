"""Starts nodes by the same command on each of them, typed by people or run in pods."""

from __future__ import annotations

from paceline.remote.transport import Transport
from paceline.rendezvous.manual import ManualTransport
from paceline.schedulers.scheduler import START_OPTIONS, Options, Scheduler


class Rendezvous(Scheduler):
    """For nodes that cannot log in to each other."""

    name, title = "rdzv", "The rendezvous"
    option = "--rdzv HOST:PORT"
    start_options = (START_OPTIONS - {"hosts", "fastest"}) | {
        "rdzv", "rdzv_id", "rdzv_key_file", "node_rank", "rdzv_timeout",
    }  # fmt: skip
    accepts_hosts = False
    fixed_size_reason = "the first node waits for all the others before it begins"

    def start(self, options: Options) -> Transport:
        """Returns the first node's transport; :mod:`paceline.rendezvous.manual` has the others'."""
        if options.endpoint is None:
            raise self._cannot("needs an address")
        return ManualTransport(options.endpoint)


SCHEDULER = Rendezvous()
