"""Choose the start method for processes of distributed tests."""

import torch

# A forked process starts immediately; a spawned one imports torch for seconds. Forking is safe only while autograd has
# no threads. With a GPU, the first backward pass starts threads. Without one, only torch.compile and torch.export do,
# and not after a first backward pass, which therefore runs here.
START_METHOD = "spawn" if torch.cuda.is_available() else "fork"
torch.ones(1, requires_grad=True).backward()
