"""How tests start the processes of a distributed run."""

import torch

# A forked process starts at once, a spawned one imports torch for seconds. A process can be forked only while autograd
# has no threads. With a GPU its first backward pass starts them; without one only torch.compile and torch.export do,
# unless a backward pass came before.
START_METHOD = "spawn" if torch.cuda.is_available() else "fork"
torch.ones(1, requires_grad=True).backward()
