"""What large batches ask of the learning rate (Goyal et al. 2017, arXiv 1706.02677).

linear scaling     lr B / b                                         B: the batch of all ranks together, b: the one that lr was found with
warm-up            the rate rises in a line to that over the first steps:  lr (first + (1 - first) t / steps)
"""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tacit.errors import ConfigError


def linear_scaling(lr: float, batch: int, base_batch: int) -> float:
    """The learning rate for `batch` samples a step, from the one that was found with `base_batch`.

    Args:
        lr: The rate that was found.
        batch: Samples of a step, of all ranks together.
        base_batch: Samples of a step that `lr` was found with.

    Raises:
        ConfigError: A batch has no samples.

    Example:
        >>> linear_scaling(0.1, batch=8192, base_batch=256)
        3.2
    """
    for name, value in (("batch", batch), ("base_batch", base_batch)):
        if value < 1:
            raise ConfigError(f"{name}={value}: a batch has at least one sample")
    return lr * batch / base_batch


def warm_up(optimizer: Optimizer, steps: int, first: float = 0.0) -> LambdaLR:
    """A schedule that rises in a line to the optimizer's rates, which it reaches at step `steps`; call its `step()` after each step.

    Args:
        optimizer: Its rates are those that are reached.
        steps: How many steps it rises.
        first: The part of the rate at the first step: 1 / (how often the batch is larger) starts at the rate that was found.

    Raises:
        ConfigError: An option is outside of its limits.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=3.2)
        >>> schedule = warm_up(optimizer, steps=500, first=256 / 8192)
        >>> schedule.get_last_lr()
        [0.1]
    """
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"steps={steps}: the rate rises over at least one step")
    if not 0 <= first <= 1:
        raise ConfigError(f"first={first}: the part of the rate at the first step, 0 to 1")
    return LambdaLR(optimizer, lambda step: first + (1 - first) * min(1.0, step / steps))
