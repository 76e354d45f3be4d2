"""Training steps of several GPUs: FSDP2, DDP, blocks compiled one by one, a tensor-parallel head.

    torchrun --nproc-per-node 2 benchmarks/distributed/many_gpus.py
    torchrun --nproc-per-node 2 benchmarks/distributed/many_gpus.py --size tiny --device cpu
    torchrun --nproc-per-node 1 benchmarks/distributed/many_gpus.py --case blocks --size llama3.2-1b

Eager PyTorch, Inductor and memeff have a model each and take turns, step by step, in one process
group. A step is forward, backward and SGD; its time is that of the slowest rank. First each of them
has to have eager's loss and gradient norm: where it has not, its row says so and has no time. Peak
memory is the largest of any rank, without what the others keep. The whole head on one GPU is
measured beside the one that is split. Rank 0 writes the rows.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, rows, timing


@dataclass(frozen=True)
class Size:
    """What is measured: a Llama, the batch of a rank, and the rows and width of the lone head."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    batch: int
    length: int
    rows: int
    depth: int
    dtype: torch.dtype = torch.bfloat16
    is_tied: bool = False

    @property
    def tolerance(self) -> float:
        """How far loss and gradient norm may be from eager's, relative."""
        return 1e-4 if self.dtype == torch.float32 else 2e-2


SIZES = {
    "full": Size(128256, 2048, 8192, 8, 32, 8, 4, 2048, 8192, 4096),
    "llama3.2-1b": Size(128256, 2048, 8192, 16, 32, 8, 8, 2048, 8192, 4096, is_tied=True),
    "tiny": Size(160, 32, 48, 2, 4, 2, 2, 12, 24, 16, torch.float32),
}
BACKENDS = ("eager", "inductor", "memeff")


class OneByOne(nn.Module):
    """A model whose blocks are compiled one by one, and whose head and loss are one function."""

    def __init__(self, model: Any, compiled: Callable[[Any], Any]) -> None:
        super().__init__()
        self.trunk, self.head = model.model, model.lm_head
        for layer in self.trunk.layers:
            layer.forward = compiled(layer.forward)
        self.loss = compiled(_loss)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of the next tokens."""
        hidden = self.trunk(input_ids=input_ids).last_hidden_state[:, :-1]
        found: Tensor = self.loss(self.head, hidden, labels[:, 1:])
        return found


def _loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).flatten(0, 1).float(), labels.flatten())


@dataclass
class Subject:
    """One backend's model, and what its steps have cost."""

    backend: str
    parameters: list[nn.Parameter]
    loss: Callable[[], Tensor]
    kept: int  # bytes that it keeps between steps
    row: dict[str, Any] = field(default_factory=dict)
    samples: list[float] = field(default_factory=list)
    peak: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.parameters, lr=1e-6)

    def step(self) -> None:
        """Do one step."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checked(self, against: dict[str, Any] | None, tolerance: float) -> None:
        """Do two steps that do not count, and note loss and gradient norm, or what differs."""
        loss = self.loss()
        loss.backward()
        self.row |= {"loss": _mean(float(loss)), "gradient_norm": _norm(self.parameters)}
        for name in ("loss", "gradient_norm") if against else ():
            found, wanted = self.row[name], against[name]
            if not abs(found - wanted) <= tolerance * abs(wanted):
                self.row["error"] = f"{name} is {found:.6g}, and eager's {wanted:.6g}"
        self.optimizer.zero_grad()
        self.step()

    def timed(self, device: str) -> float:
        """Do one step that counts; return the milliseconds of the slowest rank."""
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        dist.barrier()
        took, peak = timing.with_peak(self.step, is_cuda=device == "cuda")
        self.peak = max(self.peak, peak - before + self.kept)
        return _largest(took)


def _mean(value: float) -> float:
    total = torch.tensor(value, device=_device())
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _largest(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64, device=_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _device() -> str:
    return "cpu" if dist.get_backend() == "gloo" else "cuda"


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    """Return the norm of all gradients: of those in shards, over the ranks."""
    whole, shards = (torch.zeros((), dtype=torch.float64, device=_device()) for _ in range(2))
    for parameter in parameters:
        grad: Any = parameter.grad
        is_shard = hasattr(grad, "to_local")
        total = shards if is_shard else whole
        total += (grad.to_local() if is_shard else grad).double().square().sum()
    dist.all_reduce(shards)
    return float((whole + shards).sqrt())


def _compiled(backend: str, options: dict[str, str]) -> Callable[[Any], Any]:
    """Return what compiles by a backend, or leaves things as they are."""
    if backend == "eager":
        return lambda each: each
    chosen = options if backend == "memeff" else None
    return partial(torch.compile, backend=backend, options=chosen or None)


def _llama(size: Size, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        tie_word_embeddings=size.is_tied,
        use_cache=False,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(size.dtype).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _ids(size: Size, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    return torch.randint(size.vocabulary, (size.batch, size.length), generator=generator).to(device)


def _shard(blocks: Sequence[nn.Module], root: nn.Module, device: str) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh)


Made = tuple[list[nn.Parameter], Callable[[], Tensor]]


def fsdp2(size: Size, device: str, compiled: Callable[[Any], Any]) -> Made:
    """Layers and root in groups of their own, the model compiled around them."""
    model, ids = _llama(size, device), _ids(size, device)
    _shard(list(model.model.layers), model, device)
    run = compiled(model)
    return list(model.parameters()), lambda: run(input_ids=ids, labels=ids).loss


def ddp(size: Size, device: str, compiled: Callable[[Any], Any]) -> Made:
    """DDP compiled as a whole, in pieces where its buckets end."""
    model, ids = _llama(size, device), _ids(size, device)
    run = compiled(nn.parallel.DistributedDataParallel(model))
    return list(model.parameters()), lambda: run(input_ids=ids, labels=ids).loss


def blocks(size: Size, device: str, compiled: Callable[[Any], Any]) -> Made:
    """Blocks compiled one by one, under FSDP2 if there are several ranks; head and loss as one."""
    ids = _ids(size, device)
    model = OneByOne(_llama(size, device), compiled)
    if dist.get_world_size() > 1:
        _shard(list(model.trunk.layers), model, device)
    return list(model.parameters()), lambda: model(ids, ids)


def head(size: Size, device: str, compiled: Callable[[Any], Any], *, is_split: bool = True) -> Made:
    """A head and its loss, split by classes over the ranks; every rank has all rows."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    with torch.device(device):
        linear: nn.Module = nn.Linear(size.depth, size.vocabulary, bias=False, dtype=size.dtype)
        hidden = nn.Parameter(torch.randn(1, size.rows, size.depth, dtype=size.dtype))
        labels = torch.randint(size.vocabulary, (1, size.rows))
    if is_split:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        linear = parallelize_module(linear, mesh, ColwiseParallel(output_layouts=Replicate()))
    run = compiled(_loss)
    return [*linear.parameters(), hidden], lambda: run(linear, hidden, labels)


CASES: dict[str, Callable[..., Made]] = {
    "FSDP2": fsdp2,
    "DDP": ddp,
    "blocks": blocks,
    "TP head": head,
    "whole head": partial(head, is_split=False),
}


def measure(
    case: str, size: Size, device: str, backends: Sequence[str], options: dict[str, str], steps: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each backend, of steps in turns."""
    import memeff_compile

    torch._dynamo.reset()
    memeff_compile.reset()
    subjects: list[Subject] = []
    for backend in backends:
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        made = CASES[case](size, device, _compiled(backend, options))
        kept = (torch.cuda.memory_allocated() if device == "cuda" else 0) - before
        subject = Subject(backend, *made, kept)
        subject.checked(subjects[0].row if subjects else None, size.tolerance)
        subjects.append(subject)
    right = [each for each in subjects if "error" not in each.row]
    timers = {each.backend: partial(each.timed, device) for each in right}
    samples = timing.in_turns(timers, steps)
    for each in subjects:
        row: dict[str, Any] = {"what": case, "gpus": dist.get_world_size(), "backend": each.backend}
        row |= {name: str(value) for name, value in vars(size).items() if name == "dtype"}
        row |= {name: value for name, value in vars(size).items() if name != "dtype"}
        row |= {"interleaved_with": [b for b in backends if b != each.backend], **each.row}
        if each.backend == "memeff":
            report = memeff_compile.last_report()
            counted = [(r.code, r.sites) for r in report.records if r.action == "declined"]
            row |= {"options": options, "declined": counted}
            row["fused_losses"] = report.rewrites("fuse_linear_cross_entropy")
        if each in right:
            row["ms"] = rows.percentiles(samples[each.backend])
            if device == "cuda":
                row["peak_gib"] = round(_largest(each.peak) / 2**30, 3)
        yield row
    subjects.clear()
    gc.collect()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases on all ranks of the group that torchrun starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--backend", nargs="+", default=[*BACKENDS], choices=BACKENDS)
    parser.add_argument("--size", default="full", choices=[*SIZES])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--option", action="append", default=[], help="key=value for memeff")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "distributed.jsonl")
    given = parser.parse_args(arguments)
    if is_ours := not dist.is_initialized():
        if "RANK" not in os.environ:
            parser.error("start it with torchrun --nproc-per-node N")
        if given.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if given.device == "cuda" else "gloo")
    options = dict(pair.split("=", 1) for pair in given.option)
    for case in given.case:
        for row in measure(
            case, SIZES[given.size], given.device, given.backend, options, given.steps
        ):
            if dist.get_rank() == 0:
                rows.write(given.out, row)
    if is_ours:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
