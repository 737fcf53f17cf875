"""Custom Triton kernels for training on a GPU.

`batch_norm` is used by `stem` and `conv1x1`, and `resnet` combines the three; `optimizer_step` uses `parameter_blocks`.
The package needs Triton and is imported by `build.load_accelerator` alone.
"""
