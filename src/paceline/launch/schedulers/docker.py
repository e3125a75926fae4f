"""Agents in Docker containers."""

from __future__ import annotations

from paceline.launch.schedulers.contained import ContainerTransport
from paceline.launch.schedulers.options import Options
from paceline.launch.transport import Transport


def transport(options: Options) -> Transport:
    return ContainerTransport("docker", options)
