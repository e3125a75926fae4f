"""Tests, in forked worlds, what ranks send over Paceline's direct connections."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import forked_worlds
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from paceline import train
from paceline.spec.failure import COLLECTIVE_TIMEOUT, SECONDARY_ERROR
from paceline.train.comms import Comms
from paceline.train.elastic import connections
from paceline.train.reduce import direct
from paceline.train.reduce.collectives import Collectives, ReduceContext
from paceline.train.world import World

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SHAPES = [(), (3,), (2, 5), (1000,), (30_000,)]  # sent in one round, and in two


def joined() -> Comms:
    """Forms a group and waits until it has its direct connections."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comms = Comms(World(int(os.environ["RANK"]), dist.get_world_size()), torch.device("cpu"))
    for _ in range(direct._GLOO_OPERATIONS):
        comms.barrier()
    return comms


def of(group: dist.ProcessGroup | None = None) -> direct.Mesh | None:
    return direct._groups[group or dist.distributed_c10d._get_default_group()].mesh


def refused(act: Callable[[], object]) -> str:
    with contextlib.suppress(SystemExit):
        try:
            act()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return 9 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def alike(folder: Path) -> None:
    """Results equal, to the bit, what each rank computes without communication."""
    comms = joined()
    assert of() is not None
    rank, size = comms.world.rank, comms.world.size
    for kind in TYPES:
        for shape in SHAPES:
            every = [drawn(one, shape).to(kind) for one in range(size)]
            assert torch.equal(comms._rows(every[rank]), torch.stack(every))
            total = every[0].clone()
            for one in every[1:]:
                total += one
            assert torch.equal(comms.sum(every[rank].clone()), total), (kind, shape)
    assert comms.texts("é" * rank) == ["é" * one for one in range(size)]
    assert comms.max(torch.tensor([float(rank), -float(rank)])) == [size - 1.0, 0.0]


def apart(folder: Path) -> None:
    """Groups have separate connections, also when threads use them at the same time."""
    comms = joined()
    other = Comms(comms.world, comms.device, comms.new_group())
    found: list[float] = []

    def use() -> None:
        for _ in range(200):
            found.append(float(other.sum(torch.full((500,), 2.0))[0]))

    thread = threading.Thread(target=use)
    thread.start()
    for _ in range(200):
        assert float(comms.sum(torch.ones(500))[0]) == comms.world.size
    thread.join()
    assert found == [2.0 * comms.world.size] * 200
    assert of(other.group) is not of()


def large(folder: Path) -> None:
    """Messages of several pieces, and messages shorter than their buffer, one after the other."""
    comms = joined()
    group = comms.new_group()
    rank, size = comms.world.rank, comms.world.size
    wire = Collectives(ReduceContext(group, rank, size))
    draw = torch.Generator().manual_seed(7)
    for turn in range(6):
        length = int(torch.randint(1, 5 * direct._PIECE, (), generator=draw)) // 8 * 8
        # Few distinct values, as in codes: some ranks compress them further, as on a slow link.
        every = torch.randint(0, 5, (size, size, length), dtype=torch.uint8, generator=draw)
        wire._is_slow = lambda turn=turn: (turn + rank) % 3 == 0  # type: ignore[method-assign]
        codes = length // 2 if turn % 2 else 0
        assert torch.equal(wire.all_to_all(every[rank], codes), every[:, rank]), turn
        assert torch.equal(wire.all_gather(every[rank, 0], codes), every[:, 0]), turn
        assert (of(group) is None) == (2 * turn + 2 < direct._GLOO_OPERATIONS)
    usual = next(iter(of()._sockets.values()))  # type: ignore[union-attr]
    for one in of(group)._sockets.values():  # type: ignore[union-attr]
        # the kernel adapts its buffers to the link
        was, of_little = (it.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for it in (one, usual))
        assert was != of_little


def named(folder: Path) -> None:
    """Connections use the network interface that gloo was told to use."""
    os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"] = "192.0.2.1", "lo"
    assert direct.own_address() == "127.0.0.1"


def let_go(folder: Path) -> None:
    """A group without references closes its connections."""
    comms = joined()

    before = len(of()._sockets)  # type: ignore[union-attr]
    known = len(connections.open_sockets())
    for one in list(of()._sockets.values()):  # type: ignore[union-attr]
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    comms.barrier()
    dist.destroy_process_group()
    gc.collect()
    assert not direct._groups
    assert known - len(connections.open_sockets()) >= before == comms.world.size - 1


def replaced(folder: Path) -> None:
    """A model that replaces another one takes over its group's threads and connections."""
    torch.set_num_threads(1)
    held = []
    with train.join(run_dir=folder, seed=1, quiet=True) as session:
        for _ in range(4):
            session.progress.step = session.progress.epoch = session.progress.offset = 0
            network = nn.Linear(64, 64)
            model = session.prepare(network, torch.optim.SGD(network.parameters(), 0.01))
            loader = session.loader(TensorDataset(torch.ones(640, 64)), 32)
            for _ in session.epochs(loader, steps=15):
                for (inputs,) in loader:
                    session.step(model(inputs).square().mean(1))
            del network, model, loader
            gc.collect()
            held.append([len([*Path("/proc/self", one).iterdir()]) for one in ("task", "fd")])
    threads, files = zip(*held[1:], strict=True)
    assert len({*threads}) == 1, held
    assert files[-1] < files[0] + 4, held  # gloo closes some of them a moment later


def freed(folder: Path) -> None:
    """Another thread can release ranks that wait for an absent rank; later waits fail at once."""
    comms = joined()
    if comms.world.rank == 0:
        while len(list(folder.glob("*.json"))) < comms.world.size - 1:
            time.sleep(0.05)
        os._exit(0)
    threading.Timer(0.3, direct.shut_down_all).start()
    note(folder, {"said": [refused(comms.barrier), refused(comms.barrier)]})
    os._exit(0)


def lost(folder: Path) -> None:
    """A rank that waits for a dead rank gets the error that gloo would raise."""
    comms = joined()
    if comms.world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    said = refused(comms.barrier)
    assert SECONDARY_ERROR.search(said), said
    assert refused(comms.barrier) == said  # a second attempt raises the same error
    note(folder, {"said": [said]})
    os._exit(0)


def late(folder: Path) -> None:
    """The group's timeout applies, also if it was changed after the connections were made."""
    comms = joined()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    if comms.world.rank == 0:
        time.sleep(1.5)
        os._exit(0)
    said = refused(comms.barrier)
    assert COLLECTIVE_TIMEOUT.search(said), said
    note(folder, {"said": [said]})
    os._exit(0)


def unlike(folder: Path) -> None:
    """Ranks that call different operations get an error; no message is taken for another."""
    comms = joined()
    said = refused(lambda: comms.sum(torch.ones(4 + comms.world.rank)))
    note(folder, {"said": [said]})
    os._exit(0)


def out_of_reach(folder: Path) -> None:
    """If a rank's address is unreachable, gloo carries all messages of this group only."""
    if os.environ["RANK"] == "1":
        direct.own_address = lambda: "127.0.0.1"
        listening = direct._listen

        def elsewhere(cuts: int, ranks: int) -> socket.socket | None:
            one = listening(cuts, ranks)
            assert one is not None
            one.close()  # no process listens there any more
            shut = direct._endpoint
            direct._endpoint = lambda _, key: shut(Closed(one), key)  # type: ignore[arg-type]
            return socket.create_server(("127.0.0.1", 0))

        class Closed:
            def __init__(self, one: socket.socket) -> None:
                self.place = "127.0.0.1", 9

            def getsockname(self) -> tuple[str, int]:
                return self.place

        direct._listen = elsewhere
        reaches = listening, direct._endpoint
    direct._CONNECT_TIMEOUT_S = 1.0
    comms = joined()
    assert of() is None
    assert float(comms.sum(torch.ones(5))[0]) == comms.world.size
    if os.environ["RANK"] == "1":
        direct._listen, direct._endpoint = reaches
    other = Comms(comms.world, comms.device, comms.new_group())
    for _ in range(direct._GLOO_OPERATIONS):
        other.barrier()
    assert of(other.group) is not None
    assert of() is None
    assert float(other.sum(torch.ones(5))[0]) == comms.world.size


def strangers(folder: Path) -> None:
    """Clients without the key or any message are not accepted as ranks and delay no rank."""
    listening = direct._listen
    callers = []

    def beset(cuts: int, ranks: int) -> socket.socket | None:
        one = listening(cuts, ranks)
        assert one is not None
        for said in (b"", b"x" * 20, b"GET / HTTP/1.1\r\n\r\n" * 3):
            caller = socket.create_connection(one.getsockname())
            caller.sendall(said)
            caller.shutdown(socket.SHUT_WR)
            callers.append(caller)
        for said in (b"", b"A", b"A" * 19):
            callers.append(socket.create_connection(one.getsockname()))
            callers[-1].sendall(said)
        return one

    direct._listen = beset
    comms = joined()
    assert of() is not None
    assert float(comms.sum(torch.ones(5))[0]) == comms.world.size


def note(folder: Path, found: object) -> None:
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def main(folder: Path, what: str, sizes: str) -> None:
    for size in map(int, sizes.split(",")):
        here = folder / str(size)
        here.mkdir()
        statuses = forked_worlds.run(size, lambda here=here: globals()[what](here))
        assert statuses == [-9 if what == "lost" and not one else 0 for one in range(size)], (
            statuses
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
