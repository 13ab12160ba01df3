"""A model's own step as a workload: how long each layer takes, and in which order its gradients come."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from tacit.buckets import makes_sparse
from tacit.errors import ConfigError
from tacit.plan.values import SPARSE_ALONE
from tacit.sim.workloads import Layer, Workload

_Passes = tuple[dict[str, float], dict[str, float]]  # seconds of every layer, forward and backward


def record_workload(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    name: str = "",
    repeats: int = 5,
    clock: Callable[[], float] = perf_counter,
) -> Workload:
    """`model(*inputs)` and its backward pass, timed by hooks: the medians of `repeats` steps after one to warm up.

    A module with parameters of its own is a layer. What runs between two layers counts to the later one, so the layers add up
    to the whole step. `loss` makes a scalar of the output (by default the mean of it, or of its first tensor). Parameters and
    gradients stay as they were; buffers such as running means move on. On an accelerator every layer waits for it.
    """
    return timed_layers(model, inputs, loss=loss, name=name, repeats=repeats, clock=clock)[0]


def timed_layers(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    name: str = "",
    repeats: int = 5,
    clock: Callable[[], float] = perf_counter,
    timed: Callable[[Callable[[], object]], float] | None = None,
) -> tuple[Workload, list[float]]:
    """As `record_workload`, with the seconds of each step beside it, as `timed` finds them when it runs one."""
    if repeats < 1:
        raise ConfigError(f"repeats={repeats}: record 1 step or more")
    layers = layers_of(model)
    if not layers:
        raise ConfigError(
            f"{name or type(model).__name__} has no trainable parameter; there is nothing to exchange"
        )
    if not any(exchanged(*each) for each in layers.values()):
        raise ConfigError(f"{name or type(model).__name__} {SPARSE_ALONE}")
    kept = [(p, p.grad) for p in model.parameters()]
    try:
        steps, totals = list[_Passes](), list[float]()
        for _ in range(repeats + 1):
            totals.append(
                (timed or _clocked)(
                    lambda: steps.append(_step(model, layers, inputs, loss or mean_of, clock))
                )
            )
        del steps[0], totals[0]
    finally:
        for parameter, grad in kept:
            parameter.grad = grad
    forward = {n: median(step[0].get(n, 0.0) for step in steps) for n in layers}
    backward = {n: median(step[1].get(n, 0.0) for step in steps) for n in layers}
    order = [n for n in reversed(steps[0][1]) if n in layers]
    silent = [n for n in layers if n not in order]  # no gradient came: not used in this forward pass
    found = [Layer(n, exchanged(*layers[n]), forward[n], backward[n]) for n in (*order, *silent)]
    device = next(model.parameters()).device
    source = f"recorded: median of {repeats} steps on {device}"
    return Workload(name or type(model).__name__, tuple(found), source), totals


def _clocked(run: Callable[[], object]) -> float:
    start_s = perf_counter()
    run()
    return perf_counter() - start_s


def layers_of(model: nn.Module) -> dict[str, tuple[nn.Module, list[nn.Parameter]]]:
    """Modules with trainable parameters of their own; a shared one belongs to the first."""
    seen: set[int] = set()
    found = {}
    for path, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad and id(p) not in seen]
        seen.update(map(id, own))
        if own:
            found[path or type(model).__name__] = (module, own)
    return found


def exchanged(module: nn.Module, own: Sequence[nn.Parameter]) -> int:
    """Elements of a layer's gradients: of a sparse table none, since rows are exchanged in another way."""
    return 0 if makes_sparse(module) else sum(p.numel() for p in own)


def _step(
    model: nn.Module,
    layers: dict[str, tuple[nn.Module, list[nn.Parameter]]],
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor],
    clock: Callable[[], float],
) -> _Passes:
    """Seconds of every layer, forward and backward, in the order in which they ended."""
    last_s = 0.0

    def end(into: dict[str, float], name: str) -> None:
        nonlocal last_s
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now_s = clock()
        # a layer with several parameters ends with the last of them
        spent_s = into.pop(name, 0.0) + now_s - last_s
        into[name], last_s = spent_s, now_s

    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    with ExitStack() as hooks:
        for name, (module, parameters) in layers.items():
            hook = module.register_forward_hook(lambda *_, name=name: end(forward, name))
            hooks.callback(hook.remove)
            for parameter in parameters:
                hook = parameter.register_post_accumulate_grad_hook(lambda _, name=name: end(backward, name))
                hooks.callback(hook.remove)
        for parameter in model.parameters():
            parameter.grad = None
        last_s = clock()
        value = loss(model(*inputs))
        if forward:
            end(forward, next(reversed(forward)))  # what comes after the last layer, the loss too
        last_s = clock()
        value.backward()
    return forward, backward


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that are there, by layer as `record_workload` names them, each in one vector; zeros where none came. Without sparse
    tables."""
    return {
        name: torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).float() for p in own]
        )
        for name, (module, own) in layers_of(model).items()
        if not makes_sparse(module)
    }


def mean_of(output: Any) -> Tensor:
    """A scalar of what a model returns: the mean of it, or of its first tensor."""
    while not isinstance(output, Tensor):
        if not isinstance(output, list | tuple | dict) or not output:
            raise ConfigError(
                f"the model returns {type(output).__name__}; give loss=, which makes a scalar of it"
            )
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output.float().mean()
