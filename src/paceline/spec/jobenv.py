"""The environment variables by which a launched process knows its place.

The first group is torchrun's contract, which every framework understands. The second is ours;
``paceline.train`` reads it when it is there and does without it when it is not.
"""

from __future__ import annotations

RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"  # rank of the node
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"  # number of nodes
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

RUN_ID = "PACELINE_RUN_ID"
ATTEMPT = "PACELINE_ATTEMPT"
HOST = "PACELINE_HOST"  # the host's name in the description
HOSTS = "PACELINE_HOSTS"  # names of all hosts that the job may run on, with commas between
ADDRESSES = "PACELINE_ADDRESSES"
"""Addresses and networks from which the job's hosts connect, with commas between. Set by the
launcher, with yours before them (``--env``); connections from elsewhere are refused. Empty when a
host could not tell its addresses: then nothing is refused."""
PLANNED_WORLD = "PACELINE_WORLD_SIZE"  # asserted by every rank after it has joined
RUN_DIR = "PACELINE_RUN_DIR"
"""Folder on this node for the run's files. What rank 0 leaves there is brought back to the
launching machine when the job ends (nothing is copied where both are the same folder)."""
HOME_DIR = "PACELINE_HOME_DIR"
"""The run directory as the user knows it, on the launching machine: for messages."""
DATA_DIR = "PACELINE_DATA_DIR"
"""The folder of data (``--data``) on this node."""
PROBE = "PACELINE_PROBE"
"""A few measured steps are wanted instead of a training, as JSON: ``batches`` (global batches),
``parts`` (the same as parts of the training's own) and ``seconds`` to spend. Set by
``paceline forecast``; read by ``paceline.train``, which leaves ``steps.json`` in the run directory
and ends."""
CHECKPOINT_COPIES = "PACELINE_CHECKPOINT_COPIES"
"""On how many other hosts each checkpoint is to be, where the script does not say: a number, or
``auto``. Set by you; read by ``paceline.train``."""
DATA_HOME = "PACELINE_DATA_HOME"
"""The same folder on the launching machine: as it is recorded, and looked for the next time."""
INPUTS = "PACELINE_INPUTS"
"""Other folders of the launching machine that were sent, and where they lie on this node: JSON."""
EVENT_FD = "PACELINE_EVENT_FD"
"""Number of an inherited file descriptor for JSON lines (UTF-8, one ``write`` of at most
``PIPE_BUF`` bytes or a single-threaded writer). Every line is an object with ``kind``:

``event``     ``{"kind": "event", "event": NAME, ...details}``, recorded in events.jsonl
``metrics``   ``{"kind": "metrics", ...}``, appended to metrics.jsonl by the launcher
``begin``     ``{"kind": "begin", "resumed": BOOL}``: a training begins or resumes; steps that
              metrics.jsonl has are then left out
``progress``  ``{"kind": "progress", "step": int, "steps": int, "epoch": int, "epochs": int,
              "loss": float, "samples_per_s": float}``, drawn by the launcher as a live bar
``say``       ``{"kind": "say", "text": str}``, one line for the user, shown without a label
``heartbeat`` ``{"kind": "heartbeat", "step": int, "phase": str}``
"""
CONTROL_FD = "PACELINE_CONTROL_FD"
"""Number of an inherited file descriptor from which a rank reads JSON lines (UTF-8): what it is to
do when ranks are lost and come back, and when a person asks for it. Every line is an object with
``control``:

``regroup``   ``{"control": "regroup", "generation": int, "members": [{"slot": int, "host": str,
              "local_rank": int, "local_size": int}, …], "store": {"address": str, "port": int},
              "planned": bool, "holds": bool, "addresses": str}``: make a new group of these
              members, in this order, under the prefix ``generation/N`` of that store.
              ``addresses`` replaces ``PACELINE_ADDRESSES``. Planned: between two steps, for
              somebody joins. Not planned: at once, for somebody is gone. Holds: no batch is begun
              in it, for too few nodes are there; who joins gets the state
``save``      ``{"control": "save", "number": int}``: make a checkpoint, all at the same step,
              unless one was made for that number or a later one
``end``       ``{"control": "end", "why": str}``: no recovery: raise the error that you have
"""
NEWCOMER = "PACELINE_NEWCOMER"
"""``1`` for a rank that is started into a running attempt, to join the others between two steps."""
TOKEN = "PACELINE_JOB_TOKEN"  # noqa: S105 - the name of the variable; identifies our processes

# What a command of ``--notify`` finds, once a run has ended. None of these says a rank's place, so
# that a job which such a command starts does not take itself for a part of the run that is over.
ENDED_RUN = "PACELINE_RUN"  # the run directory
ENDED_NAME = "PACELINE_RUN_NAME"
OUTCOME = "PACELINE_OUTCOME"  # finished, failed, interrupted, not started
EXIT_STATUS = "PACELINE_EXIT_STATUS"
SECONDS = "PACELINE_SECONDS"
METRICS = "PACELINE_METRICS"  # the last value of each metric, as JSON
FIRST_FAILURE = "PACELINE_FAILURE"  # one line; empty where nothing failed
SENTENCE = "PACELINE_TEXT"  # all of it for a person, in one line

_OURS = {RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE,
         MASTER_ADDR, MASTER_PORT, "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
         RUN_ID, ATTEMPT, HOST, HOSTS, PLANNED_WORLD, RUN_DIR, HOME_DIR, DATA_DIR, DATA_HOME,
         INPUTS, EVENT_FD, CONTROL_FD, NEWCOMER, PROBE, TOKEN}  # fmt: skip


def is_ours(name: str) -> bool:
    """True for variables that say a rank's place, which the plan decides."""
    return name in _OURS or name.startswith("TORCHELASTIC_")
