"""Training steps of several GPUs: FSDP2, DDP, blocks compiled one by one, tensor parallelism.

    torchrun --nproc-per-node 2 benchmarks/distributed/many_gpus.py
    torchrun --nproc-per-node 2 benchmarks/distributed/many_gpus.py --size tiny --device cpu
    torchrun --nproc-per-node 1 benchmarks/distributed/many_gpus.py --case blocks --size llama3.2-1b
    torchrun --nproc-per-node 2 benchmarks/distributed/many_gpus.py --size llama3-8b --look
    torchrun --nproc-per-node 2 benchmarks/distributed/many_gpus.py --case blocks@llama3.1-8b

Eager PyTorch, Inductor and memeff have a model each and take turns, step by step, in one process
group. A step is forward, backward and SGD (AdamW for `llama3.1-8b`, whose weights are created in
shards); its time is that of the slowest rank. First each of them
has to have eager's loss and gradient norm: otherwise its row has the reason and no time. Peak
memory is the largest of any rank, without the other backends' models; for a lone head there is also
the memory on top of its gradients. The whole head on one GPU is measured as well as the split one.
`--look` adds a step that does not count, in which rank 0 records the bytes of the collectives, and
the largest block that the allocator was asked for. Rank 0 writes the rows.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks import RESULTS, rows, timing
from benchmarks.distributed import looking


@dataclass(frozen=True)
class Size:
    """The measured sizes: a Llama, the batch of a rank, and the rows and width of the lone head."""

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
    optimizer: str = "SGD"
    is_made_in_shards: bool = False  # the whole model is on the meta device; not for all cases

    @property
    def tolerance(self) -> float:
        """How far loss and gradient norm may be from eager's, relative."""
        return 1e-4 if self.dtype == torch.float32 else 2e-2


SIZES = {
    "full": Size(128256, 2048, 8192, 8, 32, 8, 4, 2048, 8192, 4096),
    "llama3.2-1b": Size(128256, 2048, 8192, 16, 32, 8, 8, 2048, 8192, 4096, is_tied=True),
    "llama3-8b": Size(128256, 4096, 14336, 8, 32, 8, 4, 2048, 8192, 4096),
    "llama3.1-8b": Size(
        *(128256, 4096, 14336, 32, 32, 8, 2, 8192, 8192, 4096),
        optimizer="AdamW",
        is_made_in_shards=True,
    ),
    "wide-vocabulary": Size(151936, 2560, 9728, 8, 20, 4, 4, 2048, 8192, 2560),
    "tiny": Size(160, 32, 48, 2, 4, 2, 2, 12, 24, 16, torch.float32),
    "tiny-in-shards": Size(
        *(160, 32, 48, 2, 4, 2, 2, 12, 24, 16, torch.float32),
        optimizer="AdamW",
        is_made_in_shards=True,
    ),
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

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return the mean loss of the next tokens."""
        trunk = self.trunk(input_ids=input_ids, attention_mask=attention_mask)
        found: Tensor = self.loss(self.head, trunk.last_hidden_state[:, :-1], labels[:, 1:])
        return found


def _loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).flatten(0, 1).float(), labels.flatten())


@dataclass
class Subject:
    """One backend's model, and the cost of its steps."""

    backend: str
    parameters: list[nn.Parameter]
    loss: Callable[[], Tensor]
    kind: str = "SGD"
    kept: int = 0  # bytes that it keeps between steps
    row: dict[str, Any] = field(default_factory=dict)
    peak: int = 0

    @property
    def gradients(self) -> int:
        """How many bytes the gradients take on this rank."""
        return sum(_local(parameter).nbytes for parameter in self.parameters)

    def __post_init__(self) -> None:
        # In one group the foreach form would be given plain tensors and DTensors together.
        kinds = [[p for p in self.parameters if hasattr(p, "to_local") == k] for k in (False, True)]
        groups = [{"params": some} for some in kinds if some]
        how = {"fused": True} if self.kind == "AdamW" else {}  # the default is slow for DTensors
        self.optimizer = getattr(torch.optim, self.kind)(groups, lr=1e-6, **how)

    def step(self) -> None:
        """Do one step."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def checked(self, against: dict[str, Any] | None, tolerance: float) -> None:
        """Do two steps that do not count, and record loss and gradient norm, or the difference."""
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
        return slowest(took)


def _mean(value: float) -> float:
    total = torch.tensor(value, device=_device())
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def slowest(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64, device=_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _device() -> str:
    return "cpu" if dist.get_backend() == "gloo" else "cuda"


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _copies(tensor: Any) -> int:
    """Return how many ranks hold the same numbers as this one."""
    ranks = dist.get_world_size()
    if not hasattr(tensor, "to_local"):
        return ranks
    cut = [i for i, place in enumerate(tensor.placements) if not place.is_replicate()]
    return ranks // math.prod(tensor.device_mesh.size(i) for i in cut)


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    """Return the norm of all gradients, over the ranks."""
    total = torch.zeros((), dtype=torch.float64, device=_device())
    for parameter in parameters:
        grad: Any = parameter.grad
        total += _local(grad).double().square().sum() / _copies(grad)
    dist.all_reduce(total)
    return float(total.sqrt())


def _compiled(backend: str, options: dict[str, str]) -> Callable[[Any], Any]:
    """Return a function that compiles by a backend, or returns its argument."""
    if backend == "eager":
        return lambda each: each
    chosen = options if backend == "memeff" else None
    return partial(torch.compile, backend=backend, options=chosen or None)


def _llama(size: Size, device: str, *, is_checkpointed: bool = True) -> Any:
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
    with torch.device("meta" if size.is_made_in_shards else device):
        model = LlamaForCausalLM(config).to(size.dtype).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _ids(size: Size, device: str, group: int | None = None) -> Tensor:
    """Return a rank's token ids, or those of all ranks of one tensor-parallel group."""
    generator = torch.Generator().manual_seed(1 + (dist.get_rank() if group is None else group))
    return torch.randint(size.vocabulary, (size.batch, size.length), generator=generator).to(device)


def line(device: str) -> DeviceMesh:
    """Return the mesh of all ranks."""
    return init_device_mesh(device, (dist.get_world_size(),))


def _shard(
    blocks: Sequence[nn.Module],
    root: nn.Module,
    mesh: DeviceMesh,
    *,
    keeps_last: bool = False,
    ahead: int = 1,
    together: int = 1,
    apart: Sequence[nn.Module] = (),
) -> None:
    """Shard blocks, so many ``together``, and the root in separate groups; the backward pass
    gathers so many of them ``ahead`` of the one that it is at. Modules ``apart`` from the root,
    like torchtitan's norm and head, are one more group, kept from the forward.
    """
    from torch.distributed.fsdp import fully_shard

    groups = [list(blocks[i : i + together]) for i in range(0, len(blocks), together)]
    for group in groups:
        is_kept = keeps_last and group is groups[-1]
        fully_shard(
            group if together > 1 else group[0], mesh=mesh, reshard_after_forward=not is_kept
        )
    if apart:
        fully_shard(list(apart), mesh=mesh, reshard_after_forward=False)
    fully_shard(root, mesh=mesh)
    first: list[Any] = [group[0] for group in groups] if ahead > 1 else []
    for place, block in enumerate(first):
        block.set_modules_to_backward_prefetch(first[max(place - ahead, 0) : place][::-1])


def cut(model: Any, mesh: DeviceMesh, *, looks_up_parts: bool = True) -> Any:
    """Cut a Llama for tensor parallelism, in place; its embedding too, or not."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import parallel as tp

    layer, plan = "model.layers.*.", dict[str, Any]()
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[layer + name] = tp.ColwiseParallel()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        plan[layer + name] = tp.ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[layer + name] = tp.RowwiseParallel()
    plan["lm_head"] = tp.ColwiseParallel(output_layouts=Replicate())
    if looks_up_parts:
        plan["model.embed_tokens"] = tp.RowwiseParallel(input_layouts=Replicate())
    return tp.parallelize_module(model, mesh, plan)


def _filled(model: Any, device: str) -> Any:
    """Give a sharded model on the meta device random weights, in place, shard by shard."""
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    torch.manual_seed(1 + dist.get_rank())
    with torch.no_grad():
        for weight in model.parameters():
            local = _local(weight)
            if weight.dim() > 1:
                local.normal_(std=model.config.initializer_range)
            else:
                local.fill_(1.0)
    return model


Made = tuple[list[nn.Parameter], Callable[[], Tensor]]


def fsdp2(
    size: Size,
    device: str,
    compiled: Callable[[Any], Any],
    *,
    is_layerwise: bool = False,
    is_head_apart: bool = False,
    **layout: Any,
) -> Made:
    """Layers and root in separate groups, the model compiled around them.

    Layer by layer, too, as `memeff_compile.compile` does it: transformers before 5.23 checkpoints
    around FSDP2's hooks, and Dynamo leaves such layers out of the graphs of a whole model. The last
    layer, which the backward needs first, may be kept whole from the forward.
    """
    model, ids = _llama(size, device), _ids(size, device)
    apart = [model.model.norm, model.lm_head] if is_head_apart else []
    _shard(list(model.model.layers), model, line(device), apart=apart, **layout)
    if size.is_made_in_shards:
        _filled(model, device)
    for layer in model.model.layers if is_layerwise else ():
        layer.forward = compiled(layer.forward)
    run = compiled(model)
    return list(model.parameters()), lambda: run(input_ids=ids, labels=ids).loss


def tensor_parallel(size: Size, device: str, compiled: Callable[[Any], Any]) -> Made:
    """Every linear layer cut over the ranks, the head by its classes; one batch for all.

    Not checkpointed: AOTAutograd refuses checkpoints around DTensors.
    """
    model = cut(_llama(size, device, is_checkpointed=False), line(device))
    ids = _ids(size, device, 0)
    run = compiled(model)
    return list(model.parameters()), lambda: run(input_ids=ids, labels=ids).loss


def both_ways(size: Size, device: str, compiled: Callable[[Any], Any]) -> Made:
    """Split over pairs of ranks, and sharded by FSDP2 over the pairs; not checkpointed.

    The embedding is whole: in a separate graph torch fails on a split one.
    """
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "classes"))
    whole = _llama(size, device, is_checkpointed=False)
    model = cut(whole, mesh["classes"], looks_up_parts=False)
    ids = _ids(size, device, mesh.get_local_rank("data"))
    _shard(list(model.model.layers), model, mesh["data"])
    run = compiled(model)
    return list(model.parameters()), lambda: run(input_ids=ids, labels=ids).loss


def ddp(size: Size, device: str, compiled: Callable[[Any], Any]) -> Made:
    """DDP compiled as a whole, in pieces where its buckets end."""
    model, ids = _llama(size, device), _ids(size, device)
    run = compiled(nn.parallel.DistributedDataParallel(model))
    return list(model.parameters()), lambda: run(input_ids=ids, labels=ids).loss


def blocks(
    size: Size, device: str, compiled: Callable[[Any], Any], *, is_padded: bool = False
) -> Made:
    """Blocks compiled one by one, under FSDP2 if there are several ranks; head and loss as one.

    Padded, each sequence but the first ends a sixteenth of the length earlier than the one before.
    transformers makes a mask of it outside of the blocks' graphs, and gives it to each of them.
    """
    ids, mask, labels = _ids(size, device), None, None
    if is_padded:
        shorter = max(size.length // 16, 1)
        lengths = size.length - torch.arange(size.batch) * shorter
        mask = (torch.arange(size.length) < lengths[:, None]).to(device)
        labels = ids.masked_fill(~mask, -100)
    whole = _llama(size, device)
    model = OneByOne(whole, compiled)
    if dist.get_world_size() > 1:
        _shard(list(model.trunk.layers), model, line(device))
    if size.is_made_in_shards:
        _filled(whole, device)
    return list(model.parameters()), lambda: model(ids, ids if labels is None else labels, mask)


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
        plan = ColwiseParallel(output_layouts=Replicate())
        linear = parallelize_module(linear, line(device), plan)
    run = compiled(_loss)
    return [*linear.parameters(), hidden], lambda: run(linear, hidden, labels)


CASES: dict[str, Callable[..., Made]] = {
    "FSDP2": fsdp2,
    "FSDP2 by layers": partial(fsdp2, is_layerwise=True),
    "FSDP2 by layers, last kept": partial(fsdp2, is_layerwise=True, keeps_last=True),
    "FSDP2 by layers, last kept, two ahead": partial(
        fsdp2, is_layerwise=True, keeps_last=True, ahead=2
    ),
    "FSDP2 by layers, last two kept": partial(
        fsdp2, is_layerwise=True, keeps_last=True, together=2
    ),
    "FSDP2, norm and head apart": partial(fsdp2, is_head_apart=True),
    "DDP": ddp,
    "blocks": blocks,
    "padded blocks": partial(blocks, is_padded=True),
    "TP": tensor_parallel,
    "FSDP2 x TP": both_ways,
    "TP head": head,
    "whole head": partial(head, is_split=False),
}


@dataclass(frozen=True)
class Asked:
    """The quantities to measure of each case."""

    backends: Sequence[str]
    options: dict[str, str]  # of memeff
    steps: int
    looks: bool  # at collectives and blocks, too
    libraries: int  # bytes that cuBLAS took for itself, which count for each of them


def measure(case: str, size: Size, device: str, asked: Asked) -> Iterator[dict[str, Any]]:
    """Yield a row for each backend, of steps in turns."""
    import memeff_compile

    torch._dynamo.reset()
    memeff_compile.reset()
    subjects, backends, begun = list[Subject](), asked.backends, time.perf_counter()
    for backend in backends:
        gc.collect()
        before = _allocated(device)
        made = CASES[case](size, device, _compiled(backend, asked.options))
        subject = Subject(backend, *made, kind=size.optimizer)
        subject.checked(subjects[0].row if subjects else None, size.tolerance)
        gc.collect()
        subject.kept = _allocated(device) - before  # weights, and DDP's buckets
        subjects.append(subject)
    del made, subject
    right = [each for each in subjects if "error" not in each.row]
    timers = {each.backend: partial(each.timed, device) for each in right}
    samples = timing.in_turns(timers, asked.steps)
    for each in subjects:
        row: dict[str, Any] = {"what": case, "gpus": dist.get_world_size(), "backend": each.backend}
        row |= {name: str(value) for name, value in vars(size).items() if name == "dtype"}
        row |= {name: value for name, value in vars(size).items() if name != "dtype"}
        row["compiled_and_timed_s"] = round(time.perf_counter() - begun, 1)
        row |= {"interleaved_with": [b for b in backends if b != each.backend], **each.row}
        if each.backend == "memeff":
            report = memeff_compile.last_report()
            counted = [(r.code, r.sites) for r in report.records if r.action == "declined"]
            row |= {"options": asked.options, "declined": counted}
            outside = [graph for graph in report.graphs if graph.logits and graph.logits.fused]
            row["fused_losses"] = report.rewrites("fuse_linear_cross_entropy") + len(outside)
        if each in right:
            row["ms"] = rows.percentiles(samples[each.backend])
            if "TP" not in case and not case.endswith(" head"):  # each rank has its own tokens
                seconds = row["ms"]["median"] / 1e3
                row["tokens_per_second_and_gpu"] = round(size.batch * size.length / seconds, 1)
            if device == "cuda":
                row["peak_gib"] = round((slowest(each.peak) + asked.libraries) / 2**30, 3)
            if device == "cuda" and case.endswith(" head"):
                beyond = each.peak - each.kept - each.gradients
                row["beyond_gradients_mib"] = round(slowest(beyond) / 2**20, 1)
        yield row
    for each in right if asked.looks else ():
        seen = {"backend": each.backend, **looking.at(each.step, device)}
        yield {"what": f"{case}, looked at", "gpus": dist.get_world_size(), **seen}
    subjects.clear()
    right.clear()
    timers.clear()


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _of_libraries(device: str) -> int:
    """Have cuBLAS allocate its workspace; return the bytes."""
    one = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    _ = one @ one
    del one, _
    return _allocated(device)


def tried(found: Iterator[dict[str, Any]], case: str) -> Iterator[dict[str, Any]]:
    """Yield rows, or the error of a case: that is a result, and other cases follow."""
    try:
        yield from found
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:300]
        yield {"what": case, "gpus": dist.get_world_size(), "error": said}


@contextmanager
def group(parser: argparse.ArgumentParser, device: str) -> Iterator[None]:
    """Join the process group that torchrun starts, if there is none, and leave it again."""
    if is_ours := not dist.is_initialized():
        if "RANK" not in os.environ:
            parser.error("start it with torchrun --nproc-per-node N")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    yield
    if is_ours:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases on all ranks of the group that torchrun starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*CASES, *(f"{case}@{size}" for case in CASES for size in SIZES)]
    parser.add_argument("--case", nargs="+", default=[*CASES], choices=every, metavar="CASE[@SIZE]")
    parser.add_argument("--backend", nargs="+", default=[*BACKENDS], choices=BACKENDS)
    parser.add_argument("--size", nargs="+", default=["full"], choices=[*SIZES])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--option", action="append", default=[], help="key=value for memeff")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--look", action="store_true", help="note collectives and blocks")
    parser.add_argument("--out", type=Path, default=RESULTS / "distributed.jsonl")
    given = parser.parse_args(arguments)
    options = dict(pair.split("=", 1) for pair in given.option)
    with group(parser, given.device):
        asked = Asked(given.backend, options, given.steps, given.look, _of_libraries(given.device))
        for asked_for in given.case:
            case, _, named = asked_for.partition("@")
            for size in [named] if named else given.size:
                for row in tried(measure(case, SIZES[size], given.device, asked), case):
                    if dist.get_rank() == 0:
                        rows.write(given.out, {"size": size, **row})


if __name__ == "__main__":
    main()
