"""The environment variables of a rank.

The first group is torchrun's contract, which every framework understands. The second is Paceline's;
``paceline.train`` also works without it.
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
HOSTS = "PACELINE_HOSTS"  # names of all hosts that the job may run on, comma-separated
ADDRESSES = "PACELINE_ADDRESSES"
ADDED_ADDRESS = "+"  # before an address or network that the user has added
"""Addresses and networks from which the job's hosts connect, comma-separated. Set by the launcher,
after yours (``--env``); other connections are refused. Empty if a host does not know its addresses:
then none is refused."""
STORE = "PACELINE_STORE"
"""``open`` makes the rendezvous store listen on the address of rank 0's host, which is then
``MASTER_ADDR``. Set by you (``--env``)."""
PLANNED_WORLD = "PACELINE_WORLD_SIZE"  # checked by every rank after it has joined
RUN_DIR = "PACELINE_RUN_DIR"
"""Folder on this node for the run's files. Rank 0's files are copied to the launching machine
during the run and when it ends, unless both are the same folder."""
LAUNCHER_RUN_DIR = "PACELINE_HOME_DIR"
"""The run directory on the launching machine, for messages."""
DATA_DIR = "PACELINE_DATA_DIR"
"""The data folder (``--data``) on this node."""
TUNNELS = "PACELINE_TUNNELS"
"""How ranks reach those of other hosts in a job with ``--encrypt``: see ``agent/ranks/tunnels.py``.
"""
PROBE = "PACELINE_PROBE"
"""Requests a few measured steps instead of a training, as JSON: ``batches`` (global batches),
``parts`` (the same as fractions of the training's own) and ``seconds`` to spend. Set by
``paceline forecast``; ``paceline.train`` then writes ``steps.json`` and ends."""
COMMUNICATION = "PACELINE_COMMUNICATION"
"""How the gradients of the script's DistributedDataParallel are averaged (``--communication``)."""
CHECKPOINT_COPIES = "PACELINE_CHECKPOINT_COPIES"
"""Number of other hosts that get copies of checkpoints, or ``auto``, unless the script says.
Set by you; read by ``paceline.train``."""
LAUNCHER_DATA_DIR = "PACELINE_DATA_HOME"
"""The data folder on the launching machine, as recorded for the next start."""
INPUTS = "PACELINE_INPUTS"
"""Other shipped folders of the launching machine with their paths on this node, as JSON."""
EVENT_FD = "PACELINE_EVENT_FD"
"""Number of an inherited file descriptor for JSON lines (UTF-8, one ``write`` of at most
``PIPE_BUF`` bytes or a single-threaded writer). Every line is an object with ``kind``:

``event``     ``{"kind": "event", "event": NAME, ...details}``, recorded in events.jsonl
``metrics``   ``{"kind": "metrics", ...}``, appended to metrics.jsonl by the launcher
``begin``     ``{"kind": "begin", "resumed": BOOL}``: a training begins or resumes; steps that
              metrics.jsonl has are then skipped
``progress``  ``{"kind": "progress", "step": int, "steps": int, "epoch": int, "epochs": int,
              "loss": float, "samples_per_s": float}``, drawn by the launcher as a live bar
``say``       ``{"kind": "say", "text": str}``, one line for the user, shown without a label
``heartbeat`` ``{"kind": "heartbeat", "step": int, "phase": str}``
"""
CONTROL_FD = "PACELINE_CONTROL_FD"
"""Number of an inherited file descriptor from which a rank reads JSON lines (UTF-8): commands after
losses, and on a person's request. Every line is an object with ``control``:

``regroup``   ``{"control": "regroup", "generation": int, "members": [{"slot": int, "host": str,
              "local_rank": int, "local_size": int}, …], "store": {"address": str, "port": int,
              "host": str},
              "planned": bool, "holds": bool, "addresses": str}``: make a new group of these
              members, in this order, under the prefix ``generation/N`` of that store.
              ``host``, if it is there: the address to which the store's address leads.
              ``addresses`` replaces ``PACELINE_ADDRESSES``. Planned: between two steps, because
              ranks join. Not planned: at once, after a loss. Holds: no batch is started in it,
              because nodes are missing; ranks that join get the state
``save``      ``{"control": "save", "number": int}``: make a checkpoint, all at the same step,
              unless one was made for that number or a later one
``end``       ``{"control": "end", "why": str}``: no recovery: raise the pending error
"""
NEWCOMER = "PACELINE_NEWCOMER"
"""``1`` for a rank that joins a running attempt between two steps."""
TOKEN = "PACELINE_JOB_TOKEN"  # noqa: S105 - the name of the variable; identifies our processes

# For a command of ``--notify``. None of them is a rank's variable: a job started by such a command
# must not take itself for a part of the run that ended.
ENDED_RUN = "PACELINE_RUN"  # the run directory
ENDED_NAME = "PACELINE_RUN_NAME"
OUTCOME = "PACELINE_OUTCOME"  # finished, failed, interrupted, not started
EXIT_STATUS = "PACELINE_EXIT_STATUS"
SECONDS = "PACELINE_SECONDS"
METRICS = "PACELINE_METRICS"  # the last value of each metric, as JSON
FIRST_FAILURE = "PACELINE_FAILURE"  # one line; empty without a failure
SENTENCE = "PACELINE_TEXT"  # summary for a person, in one line

_RESERVED = {RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE,
             MASTER_ADDR, MASTER_PORT, "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
             RUN_ID, ATTEMPT, HOST, HOSTS, PLANNED_WORLD, RUN_DIR, LAUNCHER_RUN_DIR, DATA_DIR,
             LAUNCHER_DATA_DIR, INPUTS, TUNNELS, EVENT_FD, CONTROL_FD, NEWCOMER, PROBE,
             COMMUNICATION, TOKEN}  # fmt: skip


def is_reserved(name: str) -> bool:
    """Whether only the plan may set the variable."""
    return name in _RESERVED or name.startswith("TORCHELASTIC_")
