"""Process group start-up, the small all-reduce that ranks agree by, and the DistributedDataParallel back end."""

import contextlib
import ctypes
import datetime
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainer.backends import Batch, Step
from trainer.profiling import WorkClock
from trainer.rendezvous import fresh_store

MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter
# The last barriers, kept for the life of the process. Otherwise gloo's thread may be the one that frees such a barrier,
# for which it needs the GIL, while the main thread holds the GIL and waits for that thread in the group's destructor:
# seen in torch 2.13 as a finished rank that never ends.
_FAREWELLS: list[dist.Work] = []
# glibc's mallopt: numbers of its parameters, from malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class Ranks:
    """Who this process is among its peers. World size 1 needs no process group and has none."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None = None  # gloo: agreement on the host never waits for the device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    @property
    def local_world_size(self) -> int:
        """Ranks on this machine, as torchrun says; without it all of them."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def collectives(self) -> str:
        """Library that moves the gradients."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum the numbers over all ranks, in float64; every rank gets the same bits. A collective."""
        if self.control is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def slots(self, values: Iterable[float]) -> list[float]:
        """This rank's values in its own place among zeros, so that a sum over the ranks shows everyone's."""
        mine = list(values)
        return [0.0] * (len(mine) * self.rank) + mine + [0.0] * (len(mine) * (self.world_size - self.rank - 1))

    def require_same(self, value: object) -> None:
        """Raise ValueError on every rank unless all ranks hold an equal value (of JSON's types). A collective."""
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
        mine = int.from_bytes(digest[:6], "little")  # 48 bits: exact in float64
        everyones = self.sum([mine if rank == self.rank else 0 for rank in range(self.world_size)])
        different = [rank for rank, other in enumerate(everyones) if other != everyones[0]]
        if different:
            raise ValueError(
                f"ranks {different} were started with other options, data or model than rank 0; every node needs the "
                "same command, code and files"
            )

    def connect(self, timeout_seconds: float) -> None:
        """Join the process group: NCCL on CUDA, gloo elsewhere, with a gloo group for agreement beside it."""
        if self.world_size == 1:
            return
        timeout = datetime.timedelta(seconds=timeout_seconds)
        on_gpu = self.device.type == "cuda"
        dist.init_process_group(
            self.collectives,
            store=fresh_store(self.rank, self.world_size, timeout_seconds),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            device_id=self.device if on_gpu else None,
        )
        self.control = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else dist.group.WORLD

    def disconnect(self) -> None:
        """Leave together: only for the normal end, because a rank that failed cannot meet the others."""
        if self.control is not None:
            farewell = dist.barrier(group=self.control, async_op=True)
            farewell.wait()
            _FAREWELLS.append(farewell)
            dist.destroy_process_group()
            self.control = None


def find_ranks(device_name: str | None) -> Ranks:
    """Read torchrun's environment (plain python: rank 0 of 1) and choose the device. Raises ValueError."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    present = [name for name in names if name in os.environ]
    if present and len(present) < len(names):
        missing = ", ".join(name for name in names if name not in os.environ)
        raise ValueError(
            f"the environment has {', '.join(present)} but not {missing}: start with torchrun, or unset them"
        )
    rank, local_rank, world_size = (
        int(os.environ.get(name, default)) for name, default in zip(names, (0, 0, 1), strict=True)
    )
    return Ranks(rank, local_rank, world_size, choose_device(device_name, local_rank))


def choose_device(name: str | None, local_rank: int) -> torch.device:
    """The device for this rank; without a name CUDA, then MPS, then the CPU. Raises ValueError.

    MiniMind's `cuda:0` means one GPU per rank here as there: the index follows the local rank where there are several.
    """
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    if name is None:
        apple = alone and torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if apple else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ValueError(f"--device {name}: use cuda, cpu or mps") from problem
    if device.type not in ("cuda", "cpu", "mps"):
        raise ValueError(f"--device {name}: use cuda, cpu or mps")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"--device {name}: this torch ({torch.__version__}) sees no Apple GPU; use --device cpu")
    if device.type == "mps" and not alone:
        raise ValueError(f"--device {name}: gloo cannot add up gradients on Apple GPUs; use one process, or cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = local_rank if "LOCAL_RANK" in os.environ else device.index or 0
        if index >= count:
            raise ValueError(
                f"--device {name}: rank needs GPU {index} but torch {torch.__version__} sees {count}; "
                "start fewer processes per node, use --device cpu, or install a CUDA build of torch"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if device.type == "cpu":
        _keep_freed_memory()
    return device


def _keep_freed_memory() -> None:
    """Let glibc give what one step has freed to the next, instead of to the system and back, page by page.

    On 8 x 768 tokens of the default model that halves the page faults of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc takes
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 64 << 20)


def sum_gradients(ranks: Ranks, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook: add up the bucket over the ranks.

    The loss is already divided by the tokens of the whole step, so the sum *is* the step's mean gradient: what
    ReduceOp.AVG gives on losses divided by a rank's share, without the two roundings of dividing and multiplying
    by the world size (2e-7 against 2e-6 on 3 ranks), and the same on gloo, which has no native AVG.
    """
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def dropout_seed(seed: int, step: int, first_sequence: int) -> int:
    """Seed of a micro-batch's dropout masks: the same however ranks and accumulation share the batch.

    Hashed to 32 bits because the CPU generator looks at no more.
    """
    digest = hashlib.sha256(f"{seed} {step} {first_sequence}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


class DataParallel:
    """The `ddp` back end: every rank holds the whole model; one reduction of the gradients per step."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        ranks: Ranks,
        *,
        dtype: str,
        grad_clip: float,
        seed: int,
        compile: bool,
        bucket_cap_mb: float,
        find_unused_parameters: bool,
    ) -> None:
        self.ranks, self.grad_clip, self.seed, self.compile = ranks, grad_clip, seed, compile
        self.module = model.to(ranks.device)
        self.optimizer = make_optimizer(model)
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.parameter_count = sum(p.numel() for p in model.parameters())
        self.trained_count = sum(p.numel() for p in self.names)
        if compile:
            model.compile()  # in place: no _orig_mod in any name
        self.autocast = torch.autocast(
            ranks.device.type, COMPUTE_DTYPES[dtype], enabled=dtype != "float32", cache_enabled=True
        )
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=dtype == "float16")
        self.model = model
        if ranks.world_size > 1:
            self.model = DistributedDataParallel(
                model,
                device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
                bucket_cap_mb=bucket_cap_mb,
                find_unused_parameters=find_unused_parameters,
                gradient_as_bucket_view=True,
            )
            self.model.register_comm_hook(ranks, sum_gradients)
        self._settled = ranks.world_size == 1
        self._meets = False  # whether the next backward pass is the one that meets the other ranks
        self.work = WorkClock(ranks.device)

    def micro_batches(self, step: Step) -> Iterator[Batch]:
        """Yield the step's micro-batches on the device; gradients stay local until the last one."""
        if not self._settled:
            self._settle_buckets(step.micro_batches[0])
        last = len(step.micro_batches) - 1
        self.work.begin()
        for index, (batch, first) in enumerate(zip(step.micro_batches, step.first_sequences, strict=True)):
            torch.manual_seed(dropout_seed(self.seed, step.number, first))
            wait = self.model.no_sync() if index < last and self.ranks.world_size > 1 else contextlib.nullcontext()
            self._meets = index == last
            with wait:
                yield self._to_device(batch)

    def loss_sum(self, batch: Batch) -> Tensor:
        """Sum of the batch's token losses, float32, in the run's compute precision."""
        # Validation goes past DDP: its ranks have unequal numbers of batches.
        model = self.model if torch.is_grad_enabled() else self.module
        with self.autocast:
            return model(**self._to_device(batch))

    def backward(self, loss: Tensor) -> Tensor:
        """Add the loss's gradients to those of the step; return its value, detached."""
        value = loss.detach()
        # An infinite loss can have finite gradients. Made NaN, they reach every rank with the reduction, so that all
        # of them skip the update without asking each other.
        poison = torch.where(value.isfinite(), 1.0, torch.nan)
        if self._meets:
            self.work.end()
        self.scaler.scale(loss * poison).backward()
        return value

    def step(self) -> Tensor:
        """Clip, update (or skip, where anything is not finite) and clear; return the norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        gradients = [parameter.grad for parameter in self.names if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        nn.utils.clip_grads_with_norm_(self.names, self.grad_clip, norm)
        if not self.scaler.is_enabled():
            # The fused kernel reads this and leaves weights and moments alone: no question to the device.
            self.optimizer.found_inf = (~norm.isfinite()).float()
        # Apple's fused kernel looks at no found_inf (torch 2.13): there the host has to wait and ask.
        if self.ranks.device.type != "mps" or norm.isfinite():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    def set_rate(self, rate: float) -> float:
        """Use this learning rate from the next update on; return it."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def save(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Full float32 weights and optimizer state by parameter name, on the host; empty but on the first rank."""
        if not self.ranks.is_first:
            return {}, {}
        optimizer = {}
        for parameter, name in self.names.items():
            # A parameter that no step has used yet has no state; zeros are what AdamW would begin with.
            state = self.optimizer.state.get(parameter) or self._fresh_state(parameter)
            optimizer |= {f"{key}.{name}": state[key].cpu() for key in MOMENTS}
        if self.scaler.is_enabled():
            optimizer |= {f"scaler.{k}": torch.tensor(v) for k, v in self.scaler.state_dict().items()}
        return {name: parameter.detach().cpu() for parameter, name in self.names.items()}, optimizer

    def load(self, weights: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Take back what `save` returned, strictly. Raises ValueError naming what is missing or left over."""
        scaler = {key: value.item() for key, value in optimizer.items() if key.startswith("scaler.")}
        optimizer = {key: value for key, value in optimizer.items() if key not in scaler}
        if scaler and self.scaler.is_enabled():
            self.scaler.load_state_dict({key.removeprefix("scaler."): value for key, value in scaler.items()})
        _require_same(self.names.values(), weights, "weights")
        _require_same(
            [f"{key}.{name}" for name in self.names.values() for key in MOMENTS], optimizer, "optimizer state"
        )
        for parameter, name in self.names.items():
            parameter.data.copy_(weights[name])
            self.optimizer.state[parameter] = {key: optimizer[f"{key}.{name}"].to(parameter.device) for key in MOMENTS}

    @staticmethod
    def _fresh_state(parameter: nn.Parameter) -> dict[str, Tensor]:
        zeros = {key: torch.zeros_like(parameter) for key in MOMENTS}
        return zeros | {"step": torch.zeros((), dtype=torch.float32)}

    def _settle_buckets(self, batch: Batch) -> None:
        """Run one synchronised pass and throw its gradients away.

        DDP lays its buckets out anew after the first reduction, and from 3 ranks on the ring then adds in another
        order: without this, a resumed run differs in the last bits from one that never stopped. A few tokens do;
        a compiled model gets the whole batch, or it would compile for two shapes.
        """
        few = batch if self.compile else {key: value[:1, :8].contiguous() for key, value in batch.items()}
        with self.autocast:
            (self.model(**self._to_device(few)) * 0.0).backward()
        self.optimizer.zero_grad()
        self._settled = True

    def _to_device(self, batch: Batch) -> Batch:
        # On Apple GPUs a copy that nobody waits for may read the batch after its memory was given away.
        on_gpu = self.ranks.device.type == "cuda"
        return {key: value.to(self.ranks.device, non_blocking=on_gpu) for key, value in batch.items()}


def _require_same(expected: Iterable[str], found: Iterable[str], what: str) -> None:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"the checkpoint's {what} do not fit this model: {len(missing)} missing ({', '.join(missing[:3])}), "
            f"{len(unknown)} unknown ({', '.join(unknown[:3])})"
        )
