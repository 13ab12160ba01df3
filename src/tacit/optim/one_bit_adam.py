"""1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888), and the variance policy of 0/1 Adam (Lu et al., ICLR 2023, arXiv 2202.06009).

    exact step    g = mean of the ranks' gradients;   m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g^2        Adam's own
    other steps   m = mean, through a codec, of the ranks' b1 m + (1 - b1) g_i;   v stays
    both          w -= lr (m' / (sqrt(v') + eps) + weight_decay w);   m' = m / (1 - b1^t),  v' = v / (1 - b2^s)

t counts steps, s exact steps, so with exact steps alone this is AdamW. Adam is not linear in the gradient, because of v: what error feedback
sends late arrives with another divisor. It is linear in m while v stays, and v hardly changes after a while. Which steps are exact is
the strategy's:

    every / exact(ef(sign), until=1000) / sharded        1-bit Adam: a warm-up of 1000 steps, then v is frozen
    every / exact(ef(sign), until=1000, doubling=16) / sharded       and then ever more rarely, as 0/1 Adam's

Of 0/1 Adam only this is here, and not its local steps. What is sent is not m but m / (sqrt(v') + eps), which all ranks undo: a codec has one scale
for a block, and an element with a small v would be thrown by as much as the block's mean. `scaled=False` sends m, as the papers do. An element that
has had no gradient in exact steps (v = 0) waits for one. Neither paper clips gradients after the warm-up: `clip_grad_norm_` would see momenta.
"""

from typing import Any

import torch
from torch import Tensor

from tacit.optim.momentum_optimizer import MomentumOptimizer
from tacit.optim.options import check_options


class OneBitAdam(MomentumOptimizer):
    """Adam whose momentum is exchanged, in as few bits as the strategy's codec has.

    Args:
        params: Parameters or groups of them.
        lr: The learning rate.
        betas: b1 and b2.
        eps: Keeps the divisor from zero.
        weight_decay: Decoupled, as AdamW's.
        scaled: Momenta are exchanged in units of the variance's root.

    Raises:
        ConfigError: An option is outside of its limits.

    Example:
        >>> import tacit, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = tacit.optim.OneBitAdam(model.parameters(), lr=1e-3)
        >>> handle = tacit.attach(model, optimizer, "every / exact(ef(sign), until=1000) / sharded")
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        scaled: bool = True,
    ):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_options(options)
        super().__init__(params, {**options, "scaled": bool(scaled)})

    def momentum(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        kept, b1 = self._kept(parameter), group["betas"][0]
        gradient.mul_(1 - b1).add_(kept["exp_avg"], alpha=b1)
        if group["scaled"]:
            gradient.div_(self._divisor(kept, group)).masked_fill_(kept["exp_avg_sq"] == 0, 0.0)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        kept, (b1, b2) = self._kept(parameter), group["betas"]
        m, v = kept["exp_avg"], kept["exp_avg_sq"]
        kept["step"] += 1
        if not self.exchanged(parameter):
            kept["exact_steps"] += 1
            m.lerp_(gradient, 1 - b1)
            v.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        elif not kept["exact_steps"]:  # nothing is known of v yet
            return
        divisor = self._divisor(kept, group)
        if self.exchanged(parameter):
            m.copy_(gradient * divisor if group["scaled"] else gradient).masked_fill_(v == 0, 0.0)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(m, divisor, value=-group["lr"] / (1 - b1 ** kept["step"]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the state of torch's Adam and AdamW too, all of whose steps were exact."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("scaled", self.defaults.get("scaled", True))
        for kept in self.state.values():
            kept["step"] = int(kept["step"])
            kept.setdefault("exact_steps", kept["step"])

    def _divisor(self, kept: dict[str, Any], group: dict[str, Any]) -> Tensor:
        variance: Tensor = kept["exp_avg_sq"] / (1 - group["betas"][1] ** max(1, kept["exact_steps"]))
        return variance.sqrt_().add_(group["eps"])

    def _kept(self, parameter: Tensor) -> dict[str, Any]:
        kept: dict[str, Any] = self.state[parameter]
        if not kept:
            kept |= {"step": 0, "exact_steps": 0}
            kept |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return kept
