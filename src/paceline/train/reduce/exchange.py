"""How the gradients of a session's replica are averaged: by DDP itself, or by a reducer of ours.

By default three and more ranks have no hook, unless a lost rank can be replaced: what DDP waits for
can then be given up (``elastic/waits.py``). Ranks average a small model's gradients directly
(``reduce/small_messages.py``), and two ranks all of theirs (``reduce/direct.py``).
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.distributed_c10d import _get_default_group
from torch.futures import Future

from paceline.spec import jobenv
from paceline.train.comms import Comms
from paceline.train.elastic import waits
from paceline.train.parallel import Replica, bucket_megabytes
from paceline.train.reduce import direct, small_messages
from paceline.train.reduce.buckets import BucketExchange, default_first_bytes
from paceline.train.reduce.exact import Exact
from paceline.train.reduce.reducer import GradientReducer

_DDP_BUCKET_BYTES = 25 << 20  # when DDP chooses


class GradientExchange(BucketExchange):
    """Averages one replica's gradients."""

    model: Replica
    keeps_order = True  # rounding depends on it: a resumed run begins in any step

    def __init__(self, model: Replica, comms: Comms) -> None:
        super().__init__(model, comms)
        self._choose_defaults()
        self._hook()

    @property
    def has_device_group(self) -> bool:
        return self._comms.has_device_group

    @property
    def exchanged(self) -> set[nn.Parameter]:
        return self.model.exchanged

    @property
    def can_roll_back(self) -> bool:
        return self.model.recovery is not None

    @property
    def _needs_hook(self) -> bool:
        # When ranks may be lost while DDP waits, it waits for what can be given up.
        is_queued = self._stream is not None or self._comms.has_device_group
        return self._active_reducer is not None or (self.can_roll_back and not is_queued)

    def _reduce_as_ddp(self, ddp_bucket: GradBucket) -> Future[Tensor]:
        flat, group = ddp_bucket.buffer(), self.model.process_group
        flat.mul_(1.0 / dist.get_world_size(group))
        return waits.cancellable_future(dist.all_reduce(flat, group=group, async_op=True), flat)

    def rollback(self) -> None:
        if self._reducer is not None:
            self._reducer.rollback()

    def reset(self) -> None:
        """Goes back to DDP's own exact way and first buckets.

        Each gradient lies where it lay at first. With three and more ranks that decides in which
        order shares are added, so the last bits: a trial may not change them.
        """
        self._hooked = None
        self._comms.collective(self._reset)
        self._reducer = None

    def _reset(self) -> None:
        if not self._comms.stale:  # else all will be made anew
            self._reducer = None
            self._lay_out(*self._sizes, as_initial=True)

    def renew(self) -> None:
        """Begins anew in the job's present group of ranks; a collective, between two steps."""
        self._group = self._hooked = None
        self.model.process_group = _get_default_group()
        self.model.mark_synchronized()
        self._retire_reducer()
        self._lay_out(*self._sizes, as_initial=True)

    def include_trained(self) -> None:
        """Averages newly trained parameters, too; between two steps. Nothing is sent."""
        self.model.include_trained()
        self._retire_reducer()
        self.set_bucket_sizes(*self._sizes)

    def _retire_reducer(self) -> None:
        """Goes back to what the present group and parameters begin with."""
        self.former_reducer, self._reducer = self.former_reducer or self._reducer, None
        self._choose_defaults()

    def _choose_defaults(self) -> None:
        uses_gloo = self._comms.device.type == "cpu"
        megabytes = bucket_megabytes(self.exchanged) if uses_gloo else None
        self._sizes = _DDP_BUCKET_BYTES, default_first_bytes()
        if megabytes is not None:
            self._sizes = int(megabytes * (1 << 20)), int(megabytes * (1 << 20))
        self._direct = self._make_exact() if self._is_small or self._is_pair else None

    def _make_exact(self) -> GradientReducer:
        return Exact(self.context(), is_small=self._is_small, is_pair=self._is_pair)

    @property
    def _is_small(self) -> bool:
        """Whether ranks average this model's gradients directly, whatever their buckets."""
        group, ranks = self.model.process_group, self._comms.world.size
        return self._on_cpus and small_messages.fits_model(self.nbytes, ranks, group)

    @property
    def _is_pair(self) -> bool:
        """Whether two ranks send each other all they have; in a probe they do as more would."""
        uses_gloo = self._on_cpus and "gloo" in dist.get_backend(self.model.process_group)
        return uses_gloo and self._comms.world.size == 2 and not os.environ.get(jobenv.PROBE)

    @property
    def _on_cpus(self) -> bool:
        return self._stream is None and not self._comms.mixed

    def leave_group(self) -> None:
        """Ends this exchange's own connections, whose threads would else stay; by all ranks.

        DDP's reducer goes on to hold this object, which is not used any more.
        """
        group, self._group = self._group, None
        self._reducer = self._direct = self.former_reducer = None
        is_separate = group is not None and group is not _get_default_group()
        if is_separate and self._stream is None and not self._comms.stale:
            direct.leave(group)
            dist.destroy_process_group(group)
