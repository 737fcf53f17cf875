"""Network and loss in one module: the forward pass of a training step."""

from collections.abc import Callable

from torch import Tensor, nn

from fedlas.losses.base import AbstractLoss
from fedlas.models import Output, WithFeatures


class NetworkWithLoss(nn.Module):
    """Network and loss in one module, which DistributedDataParallel can wrap.

    Args:
        net: the network.
        loss: the loss.
        call_net: the network or its compiled form.
        call_loss: the loss or its compiled form.
    """

    def __init__(
        self, net: WithFeatures, loss: AbstractLoss, call_net: Callable[..., Output], call_loss: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.calls = call_net, call_loss  # in a tuple, which registers no module a second time
        # DistributedDataParallel broadcasts all other buffers in every step.
        self._ddp_params_and_buffers_to_ignore = [f"loss.{name}" for name in loss.identical_buffers]

    def forward(self, inputs: Tensor, labels: Tensor, index: Tensor | None = None) -> tuple[Tensor, Output]:
        """Return the loss of a batch and the output of the network."""
        call_net, call_loss = self.calls
        output = call_net(inputs)
        return call_loss(output.logits, labels, features=output.features, index=index), output
