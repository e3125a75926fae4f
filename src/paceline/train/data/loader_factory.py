"""Makes the loaders of a session, and divides their batches among its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from paceline.spec.errors import SettingError
from paceline.spec.training.balance import validate_limits
from paceline.train import device as devices
from paceline.train import parallel
from paceline.train.data.division import BatchDivision, has_batch_norm, parse_balance
from paceline.train.data.fetch import Collate, Data, Fetch, loader_workers, order_of, usable_cpus
from paceline.train.data.fingerprint import fingerprint
from paceline.train.data.loader import Loader, Shard, check_limit
from paceline.train.data.order import EpochOrder, group_by_length, with_script_order
from paceline.train.data.shards import ShardedDataset
from paceline.train.elastic.membership import Membership
from paceline.train.measure.probe import Probe
from paceline.train.member import Member
from paceline.train.models import Models

SAME_DATA_REMEDY = (
    "make or split the data before session.prepare, after which each rank draws other random"
    " numbers, or use a generator with a seed: random_split(data, lengths,"
    " torch.Generator().manual_seed(0)). Sort lists of files. All hosts need the same files"
)


class LoaderFactory:
    """Makes loaders for training and evaluation."""

    def __init__(
        self,
        member: Member,
        models: Models,
        seed: int,
        division: BatchDivision,
        membership: Membership,
        probe: Probe | None,
    ) -> None:
        self._member, self._models, self._seed = member, models, seed
        self._division, self._membership, self._probe = division, membership, probe

    def loader(
        self,
        data: Data,
        global_batch: int,
        shuffle: bool,
        order: EpochOrder | None,
        lengths: Sequence[int] | None,
        limit: int | Mapping[str, int],
        workers: int | None,
        collate: Collate | None,
        balance: str | Mapping[str, float],
        drop_slow: bool,
    ) -> Loader:
        """See :meth:`Session.loader`."""
        member = self._member
        if workers is None:
            workers = loader_workers(usable_cpus(), member.world.local_size)
        self._check_same("the data set", data)
        sample_order = order_of(data, self._seed, shuffle)
        if order is not None:
            sample_order = with_script_order(sample_order, order)
            ids = member.together(lambda: sample_order.epoch(0))
            member.agree("the order of the samples", hashlib.sha256(ids.tobytes()).hexdigest())
        elif lengths is not None:
            sample_order = group_by_length(sample_order, lengths, global_batch)
        check_limit(limit)
        shares = parse_balance(balance)
        if self._probe is not None:  # hosts are tried alone, too
            shares, drop_slow = self._probe.replace_balance(shares), False
        self._division.check(shares, drop_slow, global_batch)
        loader = (self._probe.loader if self._probe else Loader)(
            Fetch(data, member.device, workers, collate),
            sample_order,
            lambda: self._membership.data_place,
            global_batch,
            limit if isinstance(limit, int) else self._rank_limit(limit),
            member.progress,
            self._models.unsynced,
        )
        loader.has_common_limit = isinstance(limit, int)
        loader.balance, loader.drop_slow = shares, drop_slow
        return loader

    def _check_same(self, subject: str, data: Data) -> None:
        """Raises JobError unless all ranks have the same data, as far as is known; a collective."""
        if isinstance(data, ShardedDataset):
            self._member.agree(subject, data.fingerprint)
        else:
            self._member.agree(subject, fingerprint(data), remedy=SAME_DATA_REMEDY)

    def _rank_limit(self, limits: Mapping[str, int]) -> int:
        """This rank's limit, of limits by host; a collective."""
        world = self._member.world
        hosts = [*limits]
        if self._probe is None:  # else hosts are tried alone, too
            hosts = [*(world.hosts or self._member.comms.texts(world.host))]
        validate_limits(limits, hosts)
        return limits.get(world.host, 0)

    def shard(
        self, data: Data, size: int, collate: Collate | None, on_batch: Callable[[], None]
    ) -> Shard:
        """See :meth:`Session.shard`; ``on_batch`` is called before each batch."""
        recovery, membership = self._membership.recovery, self._membership
        has_slots = recovery is not None and (recovery.able or not recovery.is_reported)
        return Shard(
            Fetch(data, self._member.device, collate=collate),
            len(data),
            lambda: membership.data_place,
            size,
            self._member.progress,
            on_batch,
            lambda: self._division.shares,
            on_iteration=lambda: self._check_same("the data set of session.shard", data),
            slot=None if recovery is None else recovery.slot,
            list_slots=membership.slots if has_slots else None,
        )

    def divide(self, loader: Loader) -> None:
        """Has a training loader's batches shared as it was asked to; a collective."""
        division, models = self._division, self._models
        division.start(loader.balance, loader.drop_slow, loader.global_batch, models)
        if not self._member.comms.joining:  # who joins goes by what fits there
            limits = division.resolve_limits(loader.memory_fits)
            loader.limit = limits[self._member.world.rank] if limits else loader.limit
        loader.shares = lambda: division.shares
        is_sharded = parallel.is_sharded(models.module)
        if is_sharded and not loader.has_common_limit:
            raise SettingError(
                "a limit for each host cannot be combined with a sharded model",
                found="its ranks meet in every layer, so all have as many passes as the others",
                remedy="--micro-batch N, the same on all hosts, or leave --shard out",
            )
        is_even = is_sharded or (loader.balance == "even" and loader.has_common_limit)
        loader.equal_pieces = lambda: is_even
        if isinstance(model := models.first.model, parallel.Replica):
            model.has_idle_rank = lambda: division.has_idle_rank
        loader.headroom = lambda: devices.batch_headroom(self._member.device)
        loader.min_samples = 2 if has_batch_norm(models.module) else 1
