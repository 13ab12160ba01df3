"""Optimizers whose ranks exchange momenta (tacit.optim.MomentumOptimizer): which trainings they fit, and when they are asked for one."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from tacit.attachments.handle import Handle
from tacit.attachments.target import Target
from tacit.buckets import sparse_names
from tacit.codecs import Exact
from tacit.errors import ConfigError, PairingError
from tacit.optim import MomentumOptimizer
from tacit.rounds import GradientRule
from tacit.schemes import Gossip
from tacit.strategy import Strategy

Offer = Callable[[str, Tensor], bool]


def check_momenta(strategy: Strategy, target: Target) -> None:
    """Raises ConfigError or PairingError where the optimizer exchanges momenta, and the model or the strategy does not fit it."""
    if isinstance(target.optimizer, MomentumOptimizer):
        _exact_steps(strategy, target)
        _check_model(target, target.optimizer)


def offer_of(handle: Handle, target: Target) -> Offer | None:
    """What makes a rank's gradient, 1-D, its momentum, in place, in the steps of `handle` that are not exact, and returns whether it did;
    None for optimizers that exchange gradients."""
    if not isinstance(target.optimizer, MomentumOptimizer):
        return None
    schedule = _exact_steps(handle.strategy, target)
    optimizer, attached = weakref.ref(target.optimizer), weakref.ref(handle)
    parameters = {name: weakref.ref(parameter) for name, parameter in target.parameters.items()}
    in_memory_order = target.kind == "ddp"

    def offer(name: str, gradient: Tensor) -> bool:
        stepping, own, parameter = optimizer(), attached(), parameters[name]()
        if stepping is None or own is None or parameter is None or schedule.exact_at(own.step):
            return False
        stepping.offer(parameter, _shaped(gradient, parameter, in_memory_order))
        return True

    return offer


def _shaped(gradient: Tensor, parameter: Tensor, in_memory_order: bool) -> Tensor:
    """A gradient, 1-D, as a view in its parameter's shape; DDP lays it out as the parameter is, where that is dense."""
    if in_memory_order and torch.empty_like(parameter).stride() == parameter.stride():
        return gradient.as_strided(parameter.shape, parameter.stride())
    return gradient.view(parameter.shape)


def _exact_steps(strategy: Strategy, target: Target) -> Exact:
    """The part of a strategy that decides when gradients travel as they are."""
    name = type(target.optimizer).__name__
    if target.asked:
        raise PairingError(
            f"{target.asked} compares codecs for gradients, and {name} exchanges momenta; write 'exact(ef(sign), until=1000)', or take another "
            f"optimizer"
        )
    if not isinstance(strategy.when, GradientRule) or isinstance(strategy.who, Gossip):
        raise PairingError(
            f"{strategy.when}: {name} exchanges momenta in every step; write 'every / exact(ef(sign), until=1000)', or take another optimizer"
        )
    if not isinstance(strategy.what, Exact):
        raise PairingError(
            f"{strategy.what}: {name} learns its variance in steps with exact gradients, and this strategy has none; write "
            f"'exact({strategy.what}, until=1000)'"
        )
    return strategy.what


def _check_model(target: Target, optimizer: MomentumOptimizer) -> None:
    name = type(optimizer).__name__
    if target.kind == "fsdp2":
        raise ConfigError(
            f"FSDP2 leaves each rank a part of the momenta, and {name} needs all of them to make the next ones; take DDP, or another optimizer"
        )
    if tables := sorted(sparse_names(target.module, target.parameters)):
        raise ConfigError(
            f"table {tables[0]!r} has sparse gradients, and {name} takes dense ones; build it with sparse=False"
        )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if odd := next((own for own, p in target.parameters.items() if id(p) not in stepped), None):
        raise ConfigError(
            f"parameter {odd!r} is not in {name}, which keeps the momenta of all that are exchanged; add it to its groups"
        )
    if getattr(target.module, "find_unused_parameters", False):
        raise ConfigError(
            f"{name} exchanges a momentum for every parameter in every step; build DDP without find_unused_parameters=, or attach the plain module"
        )
