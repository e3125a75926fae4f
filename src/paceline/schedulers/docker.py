"""Agents in Docker containers."""

from __future__ import annotations

from paceline.remote.transport import Transport
from paceline.schedulers.contained import ContainerTransport
from paceline.schedulers.options import Options


def transport(options: Options) -> Transport:
    return ContainerTransport("docker", options)
